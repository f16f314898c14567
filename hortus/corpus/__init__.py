"""`hortus embed`: whole corpora, from files to vectors, exactly once. Wires ivy and tulip as serve.py does; knows no HTTP server.

command    what a person typed, to a job that runs           vectors    a window of texts to vectors, by an engine here
files      globs and URLs to a list of files                 pieces     long texts in chunks                    (pure)
columns    which columns are read, and their types           server     a window of texts to vectors, by servers
lines      lines to JSON objects, rows of CSV, texts         cluster    the same over Ray Data
read       a file to blocks of rows                          sinks      vectors into a database
values     values to a column, or refused      (pure)        progress   how far, how fast
plan       files to units, parts and windows   (pure)        pipeline   windows in, parts out; all of it overlapping
store      the output folder: whole files or none            manifest   what a run is: the same, or refused
output     a window to rows of Parquet, and its rejects
"""
