"""Ivy, the HTTP gateway: text in, vectors out.

Knows text, token ids and HTTP. Does not know tensors or torch, Tulip or ROSE: it is given an `Encoder` (types.py).

    app = App(config.ivy, metrics)                     # answers /health at once, everything else with 503
    await serve(app, config.ivy, started=load)         # opens the port, runs load(address), serves until SIGTERM
    app.open(folder, info, encoder, probe=probe)       # inside load: the model is there, requests are taken

A request's way through the files:

    server      the port, signals, drain
    app         routes, the request's life: body, deadline, disconnect, error shape, headers, metrics
    exchange    one HTTP request read and one answer written, over ASGI
    openai      /v1/embeddings and /v1/models: schemas and the shape of answers
    embed       text to vectors: prompt, tokens, chunks, encoder, outputs
    templates   which prompt goes before a text           (pure)
    tokenize    text to TokenBatch, ids to TokenBatch
    split       large requests into chunks                (pure)
    outputs     cut, normalise, finite check, base64, JSON numbers   (pure)
    health      /health /ready /metrics /info
"""
