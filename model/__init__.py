"""The GPT as mathematics. It knows no files, no data and no training.

Layers know the mesh only through `Placement` (model/placement.py): it says which mesh
axes shard an array, and from it follow the collectives of each weight (model/gather.py)
and of attention over rows that devices share (model/attention/across.py).
"""
