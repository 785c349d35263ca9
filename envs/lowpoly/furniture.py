"""Cabinets, stove, microwave, racks, trays and other things of wood or metal: mostly their own collision boxes."""

from envs.lowpoly.facts import AssetFile
from envs.lowpoly.fitting import collision_shapes, extent
from envs.lowpoly.mjcf import Look
from envs.lowpoly.palette import BLACK, DARK_STEEL, DARK_WICKER, MAHOGANY, STEEL, TAN, WHITE, WICKER, Color
from envs.lowpoly.shapes import box, cylinder, lathe, ring

SKIN = 0.0006  # metres by which a panel stands out


def cabinet(file: AssetFile, frame: Color, front: Color, handle: Color) -> Look:
    """Three drawers that open to -y; of a drawer's collision boxes the last three are its handle."""
    shapes = {"base": collision_shapes(file.body["base"], frame)}
    for name in ("cabinet_top", "cabinet_middle", "cabinet_bottom"):
        drawer = file.body[name]
        low, high = extent(drawer, slice(0, 1))
        panel = box((low[0], low[1] - SKIN, low[2] + 0.002), (high[0], high[1], high[2] - 0.002), front)
        trough = collision_shapes(drawer, frame, slice(1, 6))
        shapes[name] = [panel, *trough, *collision_shapes(drawer, handle, slice(6, 9))]
    return Look(shapes)


def flat_stove(file: AssetFile) -> Look:
    """A steel block with three rings on a dark plate; LIBERO shows a red disc between them while it is on."""
    plate = cylinder(0.078, 0.019, 0.0212, (0.19, 0.19, 0.20), segments=24)
    rings = [
        ring(inner, inner + 0.008, 0.02, 0.0252, (0.38, 0.38, 0.40), segments=24) for inner in (0.018, 0.038, 0.057)
    ]
    button = file.body["button"]
    low, high = extent(button, slice(14, 18))
    dial = lathe([(0, 0.0004), (0.046, 0.0004), (0.044, 0.0128), (0, 0.0128)], BLACK, segments=20)
    grip = collision_shapes(button, (0.16, 0.16, 0.17), slice(14, 18))
    middle = (low[0] + high[0]) / 2
    mark = box((middle - 0.003, high[1] - 0.03, high[2] - 0.002), (middle + 0.003, high[1], high[2] + SKIN), WHITE)
    return Look(
        shapes={"burner": [plate, *rings], "button": [dial.placed((0.0013, 0.0044, 0)), *grip, mark]},
        paint={"base_vis": {"rgba": (*STEEL, 1.0)}},
    )


def microwave(file: AssetFile) -> Look:
    """Steel case, keys on the right of the door, whose window is dark. It opens to -y."""
    case = collision_shapes(file.body["object"], DARK_STEEL)
    display = box((0.10, -0.1105 - SKIN, 0.145), (0.16, -0.10, 0.168), (0.15, 0.75, 0.45))
    keys = [
        box((x, -0.1105 - SKIN, z), (x + 0.014, -0.10, z + 0.014), STEEL)
        for x in (0.10, 0.123, 0.146)
        for z in (0.035, 0.06, 0.085, 0.11)
    ]
    door = collision_shapes(file.body["microdoorroot"], (0.45, 0.46, 0.48))
    window = box((0.035, -0.025 - SKIN, -0.065), (0.215, -0.001 + SKIN, 0.065), BLACK)
    bar = box((0.2315, -0.064, -0.07), (0.2435, -0.050, 0.07), STEEL)
    bolts = [box((0.233, -0.052, z - 0.006), (0.242, -0.024, z + 0.006), STEEL) for z in (-0.06, 0.06)]
    return Look({"object": [*case, display, *keys], "microdoorroot": [*door, window, bar, *bolts]})


def basket(file: AssetFile) -> Look:
    """A wicker basket: floor, four walls, dark bands around it."""
    body = file.body["object"]
    walls = collision_shapes(body, WICKER, slice(1, 5))
    bands = []
    for wall in walls:
        low, high = wall.vertices.min(0), wall.vertices.max(0)
        for level in (0.12, 0.32, 0.52, 0.72, 0.94):
            z = low[2] + level * (high[2] - low[2])
            bands.append(box((*(low[:2] - SKIN), z), (*(high[:2] + SKIN), z + 0.006), DARK_WICKER))
    return Look({"object": [*collision_shapes(body, DARK_WICKER, slice(0, 1)), *walls, *bands]})


def wine_rack(file: AssetFile) -> Look:
    """Two sloping shelves of light wood with stops on a dark stand."""
    body = file.body["object"]
    shelves = collision_shapes(body, TAN, slice(0, 2))
    stops = collision_shapes(body, (0.35, 0.55, 0.70), slice(2, 4))
    return Look({"object": [*shelves, *stops, *collision_shapes(body, MAHOGANY, slice(4, None))]})


def wooden_tray(file: AssetFile) -> Look:
    body = file.body["object"]
    rim = collision_shapes(body, (0.45, 0.28, 0.14))
    low, high = extent(body)
    floor = box((*(low[:2] + 0.006), 0.004), (*(high[:2] - 0.006), 0.0078), (0.72, 0.52, 0.30))
    return Look({"object": [*rim, floor]})


def in_one_color(file: AssetFile, color: Color) -> Look:
    """All collision boxes of all bodies."""
    return Look({body.name or "": collision_shapes(body, color) for body in file.worldbody.walk()})
