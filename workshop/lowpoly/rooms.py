"""Make the looks of rooms: materials, lights, and furniture that nothing touches. Textures are made in `textures`.

Tables collide, so they are drawn as their collision boxes. Backgrounds have the place and size of the original meshes.
Coordinates are the world's, in metres; the robot looks towards x, and the wall behind its back is at x = -2.
"""

from collections.abc import Mapping, Sequence

from workshop.lowpoly.facts import AssetFile, Look, collision_shapes
from workshop.lowpoly.objects import COLORS, LOOKS, drawn
from workshop.lowpoly.shapes import Color, Shape, box

# (material, its texture, its emission). LIBERO's arena code knows the textures by these names. Walls emit light,
# because LIBERO's lamps hang straight above and would leave walls dark.
MATERIALS = (("floor", "texplane", 0.0), ("wall", "tex-wall", 0.35), ("table", "tex-table", 0.0))
# A matt surface; its texture repeats every metre.
MATT = {"texrepeat": "1 1", "texuniform": "true", "specular": "0", "shininess": "0", "reflectance": "0"}
# The kitchen has a third lamp. With its original brightness our plain colours would all look white.
LIGHTS = {"light_kitchen": {"diffuse": "0.2 0.2 0.2", "specular": "0.1 0.1 0.1"}}
STONE = (0.72, 0.70, 0.68)
BOOKS: Sequence[Color] = (
    (0.55, 0.15, 0.13),
    (0.16, 0.27, 0.45),
    (0.80, 0.65, 0.25),
    (0.20, 0.38, 0.27),
    (0.12, 0.12, 0.13),
)
SHELF_HEIGHTS = (0.05, 0.45, 0.85, 1.25)
BOOKS_PER_SHELF = 12


def arena_look(file: AssetFile) -> Look:
    """The look of a room: floor, walls and tables with our materials, and the scenery."""
    paint = dict(LIGHTS)
    for body in file.worldbody.walk():
        for geom in body.geoms:
            name = geom.attributes.get("name", "")
            if name == "floor" or name.endswith("_visual"):
                paint[name] = {"material": name.split("_")[0]}
    # "null" is the skybox, which has no name. All other textures are flat: a cube map would bend straight grain.
    assets = [("texture", file.textures["null"])]
    for _, texture, _ in MATERIALS:
        texture_file = file.textures[texture]["file"]
        assets.append(("texture", {"name": texture, "type": "2d", "file": texture_file}))
    for material, texture, glow in MATERIALS:
        assets.append(("material", {"name": material, "texture": texture, "emission": glow, **MATT}))
    return Look(scenery(file), paint, assets)


def scenery(file: AssetFile) -> Mapping[str, Sequence[Shape]]:
    """Shapes by name of the body: tables, drawn as their collision boxes, and the furniture in the background."""
    wood = COLORS["wood"]
    tables = {"living_room_table_col": wood, "study_table": wood, "coffee_table": STONE}
    shapes = {
        name: collision_shapes(file.body[name], color) for name, color in tables.items() if name in file.body
    }
    backgrounds = LOOKS["backgrounds"]
    rooms = [room for room in ("kitchen", "living_room", "study") if room in file.name]
    if rooms:
        shapes["world"] = []
        if rooms[0] == "study":
            shapes["world"] += [*drawn(backgrounds["shelf"]), *books()]
        shapes["world"] += drawn(backgrounds[rooms[0]])
    elif "coffee_table" in shapes:
        shapes["coffee_table"] += drawn(backgrounds["coffee_table"])
    return shapes


def books() -> list[Shape]:
    """Books of various colours and heights on every shelf of the study."""
    shapes = []
    for z in SHELF_HEIGHTS:
        for i in range(BOOKS_PER_SHELF):
            y = -1.5 + i * 0.06
            top = z + 0.27 - 0.02 * (i % 3)
            shapes.append(box((-1.80, y, z + 0.03), (-1.60, y + 0.05, top), BOOKS[i % len(BOOKS)]))
    return shapes
