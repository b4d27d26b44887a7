"""The GPT as mathematics, independent of files, data and training.

Layers know the mesh only through `Placement` (model/placement.py), which says which
mesh axes shard an array. The placement determines the collectives of each weight
(model/gather.py) and of attention over shared rows
(model/parts/context/context_parallel.py).
"""
