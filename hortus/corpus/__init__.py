"""`hortus embed`: whole corpora, from files to vectors, exactly once. Wires ivy and tulip as serve.py does; knows no HTTP server.

command    what a person typed, to a job that runs           vectors    a window of texts to vectors, by an engine here
files      globs and URLs to a list of files                 pieces     long texts in chunks                    (pure)
read       a file to blocks of rows                          server     a window of texts to vectors, by servers
plan       files to units, parts and windows   (pure)        cluster    the same over Ray Data
store      the output folder: whole files or none            sinks      vectors into a database
output     a window to rows of Parquet, and its rejects      progress   how far, how fast
manifest   what a run is: the same, or refused               pipeline   windows in, parts out; all of it overlapping
"""
