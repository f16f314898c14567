"""The small operations between matrices, each with one signature and several bodies.

`twin.py` is plain PyTorch (CPU, tests, truth); `fused.py` is Triton (GPU). A model is given one of the two modules as
`ops` and never asks which. Does not know models, attention or batches.
"""

PROCESSORS = 132
"""Multiprocessors of an H200, on which it was measured what sizes decide: as many programs run at once."""
