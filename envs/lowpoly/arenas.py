"""What an arena looks like: textures, materials and lights here, furniture in `scenery`."""

from envs.lowpoly.facts import AssetFile, Attributes
from envs.lowpoly.mjcf import Look
from envs.lowpoly.scenery import scenery_of

# Material, the texture it shows (names that LIBERO's arena code knows) and how much it shines by itself: LIBERO's lamps
# hang straight above, which leaves walls in the dark.
MATERIALS = (("floor", "texplane", 0.0), ("wall", "tex-wall", 0.35), ("table", "tex-table", 0.0))

# The kitchen has a third lamp. At the original's brightness it leaves nothing but white of these plain colours.
LIGHTS = {"light_kitchen": {"diffuse": "0.2 0.2 0.2", "specular": "0.1 0.1 0.1"}}


def arena_look(file: AssetFile) -> Look:
    names = [geom.name for body in file.worldbody.walk() for geom in body.geoms if geom.name]
    paint = {name: {"material": name.split("_")[0]} for name in names if name == "floor" or name.endswith("_visual")}
    return Look(scenery_of(file), {**paint, **LIGHTS}, [*_textures(file), *_materials()])


def _textures(file: AssetFile) -> list[tuple[str, Attributes]]:
    """The skybox, which has no name, and those of floor, walls and table. All are flat: a cube bends straight grain."""
    flat = [{"name": name, "type": "2d", "file": file.textures[name]["file"]} for _, name, _ in MATERIALS]
    return [("texture", texture) for texture in (file.textures["null"], *flat)]


def _materials() -> list[tuple[str, Attributes]]:
    """Matt, the texture once a metre."""
    matt = {"texrepeat": "1 1", "texuniform": "true", "specular": "0", "shininess": "0", "reflectance": "0"}
    return [
        ("material", {"name": name, "texture": texture, "emission": glow, **matt}) for name, texture, glow in MATERIALS
    ]
