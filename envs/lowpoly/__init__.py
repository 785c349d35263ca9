"""Low-poly models of LIBERO's objects and scenes: the official physics to the bit, simple looks, no download.

Where to find what: `looks` says what each object looks like, by the functions in `groceries`, `dishes` and
`furniture`; `arenas`, `scenery` and `textures` do the rooms; `shapes` makes the meshes; `facts` holds the physics,
`mjcf` writes both into files, `pack` the files into a folder.
"""

from envs.lowpoly.coverage import covered_tasks, missing_assets
from envs.lowpoly.pack import ensure_pack, pack_name

__all__ = ["covered_tasks", "ensure_pack", "missing_assets", "pack_name"]
