"""What each asset looks like: the table to change when an object shall look different.

A new object needs its facts in `facts.json`; without a line here it is drawn as plain boxes.
"""

from collections.abc import Callable
from functools import partial

from envs.lowpoly import dishes, furniture, groceries
from envs.lowpoly.arenas import arena_look
from envs.lowpoly.facts import AssetFile
from envs.lowpoly.fitting import plain_look
from envs.lowpoly.mjcf import Look
from envs.lowpoly.palette import (
    BLACK,
    CREAM,
    DARK_RED,
    DARK_STEEL,
    DARK_WOOD,
    GREEN,
    ORANGE,
    RED,
    SHADED_WHITE,
    STEEL,
    TAN,
    WHITE,
    YELLOW,
)

OBJECT_LOOKS: dict[str, Callable[[AssetFile], Look]] = {
    # dishes
    "akita_black_bowl": partial(
        dishes.bowl, outside=(0.05, 0.05, 0.06), rim=(0.32, 0.32, 0.34), inside=(0.13, 0.13, 0.14)
    ),
    "white_bowl": partial(dishes.bowl, outside=WHITE, rim=WHITE, inside=SHADED_WHITE),
    "red_bowl": partial(dishes.bowl, outside=RED, rim=WHITE, inside=(0.85, 0.25, 0.20)),
    "plate": dishes.plate,
    "glazed_rim_porcelain_ramekin": dishes.ramekin,
    "porcelain_mug": partial(dishes.mug, handle=-1, foot=0.65, lower=WHITE, upper=WHITE, inside=SHADED_WHITE),
    "red_coffee_mug": partial(dishes.mug, handle=1, foot=0.87, lower=RED, upper=RED, inside=CREAM),
    "white_yellow_mug": partial(dishes.mug, handle=1, foot=0.78, lower=YELLOW, upper=WHITE, inside=YELLOW),
    "chefmate_8_frypan": dishes.frypan,
    "moka_pot": dishes.moka_pot,
    "wine_bottle": dishes.wine_bottle,
    # groceries
    "alphabet_soup": partial(groceries.can, label=CREAM, band=ORANGE),
    "tomato_sauce": partial(groceries.can, label=RED, band=GREEN),
    "milk": partial(groceries.carton, body=WHITE, band=RED, roof=WHITE),
    "orange_juice": partial(groceries.carton, body=ORANGE, band=YELLOW, roof=GREEN),
    "ketchup": partial(groceries.squeeze_bottle, sauce=RED, label=WHITE, cap=WHITE),
    "salad_dressing": partial(groceries.squeeze_bottle, sauce=(0.62, 0.72, 0.42), label=CREAM, cap=GREEN),
    "new_salad_dressing": partial(groceries.squeeze_bottle, sauce=(0.88, 0.88, 0.78), label=GREEN, cap=BLACK),
    "bbq_sauce": groceries.bbq_sauce,
    "butter": groceries.butter,
    "cream_cheese": groceries.cream_cheese,
    "chocolate_pudding": groceries.chocolate_pudding,
    "cookies": groceries.cookies,
    "macaroni_and_cheese": groceries.macaroni_and_cheese,
    "popcorn": groceries.popcorn,
    "black_book": partial(groceries.book, cover=(0.08, 0.08, 0.09), title=DARK_RED),
    "yellow_book": partial(groceries.book, cover=YELLOW, title=BLACK),
    # furniture
    "wooden_cabinet": partial(furniture.cabinet, frame=(0.31, 0.21, 0.14), front=(0.52, 0.35, 0.22), handle=STEEL),
    "white_cabinet": partial(furniture.cabinet, frame=(0.80, 0.80, 0.79), front=WHITE, handle=DARK_STEEL),
    "flat_stove": furniture.flat_stove,
    "microwave": furniture.microwave,
    "basket": furniture.basket,
    "wine_rack": furniture.wine_rack,
    "wooden_tray": furniture.wooden_tray,
    "wooden_two_layer_shelf": partial(furniture.in_one_color, color=DARK_WOOD),
    "wooden_shelf": partial(furniture.in_one_color, color=DARK_WOOD),
    "desk_caddy": partial(furniture.in_one_color, color=TAN),
}


def look_of(file: AssetFile) -> Look:
    if file.is_arena:
        return arena_look(file)
    return OBJECT_LOOKS.get(file.name, plain_look)(file)
