"""Ivy, the HTTP gateway: text in, vectors out.

Knows text, token ids and HTTP. Does not know tensors or torch, Tulip or ROSE: it is given an `Encoder` (types.py).

    app = App(config.ivy, metrics)                     # answers /health at once, everything else with 503
    await serve(app, config.ivy, started=load)         # opens the port, runs load(address), serves until SIGTERM
    app.open(folder, info, encoder, probe=probe)       # inside load: the model is there, requests are taken

A request's way through the files:

    server      the port, TLS, signals, drain
    connection  one client: its requests answered one at a time; disconnect, slow clients, keep-alive
    http1       bytes to requests, answers to bytes
    exchange    Request and Answer, what passes between connection and app
    app         routes, the request's life: key, deadline, error shape, headers, metrics
    access      keys and CORS
    body        JSON bodies to structs, errors that say where
    openai      /v1/embeddings and /v1/models: OpenAI, Perplexity, vLLM    (schemas and the shape of answers)
    perplexity  /v1/contextualizedembeddings
    cohere      /v2/embed
    rerank      /rerank, /score, /classify: Cohere, Jina, vLLM, TEI
    tei         /embed, /embed_all, /embed_sparse, /similarity, /predict, /tokenize, /decode
    scores      how relevant documents are to a query, whoever asks
    embed       texts, ids, pairs or documents to rows: prompt, tokens, chunks, encoder
    templates   which prompt goes before a text, how a pair becomes one text    (pure)
    tokenize    text to TokenBatch, ids to TokenBatch: reading of one text, compose of several; vocabulary reads the
                tokenizer's files
    assemble    pairs, documents of chunks, a row a token    (pure)
    multivector late interaction: which tokens get vectors, MaxSim
    split       large requests into chunks    (pure)
    lists       JSON lists of any length, a slice at a time
    outputs     cut, normalise, quantise, finite check, base64, JSON numbers    (pure)
    replicas, link, address    schedulers on other machines, as one Encoder
    health      /health /ready /metrics /info
    openapi     /openapi.json and /docs
    page        the page at /, as files
    watch       what the page watches: a sample a second while somebody looks
    journal     the access log
    traces      OpenTelemetry
"""
