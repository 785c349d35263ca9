"""Colours that several looks share."""

Color = tuple[float, ...]  # red, green, blue and, if not opaque, alpha, from 0 to 1

WHITE = (0.93, 0.93, 0.91)
SHADED_WHITE = (0.80, 0.83, 0.86)
CREAM = (0.93, 0.86, 0.68)
YELLOW = (0.95, 0.80, 0.20)
ORANGE = (0.95, 0.50, 0.08)
RED = (0.75, 0.10, 0.08)
DARK_RED = (0.45, 0.05, 0.05)
GREEN = (0.15, 0.48, 0.20)
BLUE = (0.12, 0.28, 0.68)
LIGHT_BLUE = (0.62, 0.68, 0.80)
BROWN = (0.30, 0.16, 0.09)
BLACK = (0.07, 0.07, 0.07)

TIN = (0.72, 0.73, 0.75)
STEEL = (0.70, 0.71, 0.73)
DARK_STEEL = (0.30, 0.31, 0.33)

TAN = (0.80, 0.64, 0.44)
WICKER = (0.66, 0.46, 0.24)
DARK_WICKER = (0.47, 0.31, 0.15)
WOOD = (0.50, 0.36, 0.26)
DARK_WOOD = (0.33, 0.22, 0.15)
MAHOGANY = (0.38, 0.13, 0.07)
