"""Pathfinder (Linsley et al. 2018, arXiv:1805.08315) as Long Range Arena sets it up (Tay et al. 2020, arXiv:2011.04006).

An image holds two long dashed contours, shorter contours as distractors, and two discs. In class 1 both discs lie on the same contour, in
class 0 on different ones. The program grows the contour pairs of many attempts at the same time, dash by dash. It drops a pair as soon as
one of its contours has no room for the next dash, and draws only pairs that reach their full length.

The original program looks for room for a first dash with OpenCV's dilation of the image's mask by the dash's footprint. Where the whole
footprint lies outside the image, the dilation is a large negative number, and if it is so for any pixel, the program finds no room at all.
So only some dashes begin a contour: with Long Range Arena's settings for 32 x 32 pixels 30 of 360, all towards the upper left. Most tries
of a distractor fail, and of five an image gets 1.15 on average. The same holds here. Only an image's second contour begins with any dash.

Each image has a mask with values from 0 to 1. It is 1 in a border of `padding` pixels. A dash raises it to the mask of the dash, which is
the dash thickened by the margin, with values between 0 and 1 at its edge.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHUNK = 256  # images that are drawn together; the images of a chunk do not depend on the number of chunks
ATTEMPTS = 2048  # pairs of contours that grow at the same time
OCCUPIED = 0.3  # a pixel is occupied if the image's mask is above this there; a distractor's first dash must cover no such pixel
OVERLAP = 1.8  # a further dash has room if the sum of the image's mask and the dash's own mask is below this in all pixels of the image
TRIES = 3  # directions that are tried for each further dash of a contour
SNAKE_TRIES = 5  # contours that are tried for each distractor; if none has room, the image gets one distractor less
LEAST_ROOM = 0.01  # no distractor is begun if the share of the image's pixels that are not occupied is below this


@dataclass(frozen=True)
class Settings:
    """The settings of the original generator that Long Range Arena changes. Contour lengths are in dashes, all other lengths in pixels."""

    size: int = 32
    contour_length: int = 14
    distractor_length: int = 4
    n_distractors: int = 5
    dash_length: int = 2
    thickness: float = 0.5
    margins: tuple[int, ...] = (1,)  # possible margins between dashes; one is drawn for each chunk of images
    marker_radius: float = 1.5
    padding: int = 1
    seed_distance: int = 7
    antialias: int = 2
    continuity: float = 1.0
    contour_contrast: float = 1.5  # 0.75 of a dash times 2 of a contour
    distractor_contrast: float = 2.0

    def __post_init__(self):
        least = {"size": 1, "contour_length": 2, "distractor_length": 1, "n_distractors": 0, "dash_length": 1, "padding": 1,
                 "seed_distance": 1, "antialias": 1}
        for name, bound in least.items():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < bound:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number, at least {bound}")
        if not self.margins or any(not isinstance(margin, int) or margin < 1 for margin in self.margins):
            raise ValueError(f"margins={self.margins} must be whole numbers, at least 1")
        if self.size < 4 * self.seed_distance + 2:
            raise ValueError(f"size={self.size} must be at least 4 seed_distance + 2 = {4 * self.seed_distance + 2}")
        if self.thickness * self.antialias % 1:
            raise ValueError(f"thickness={self.thickness} must be a multiple of 1 / antialias = {1 / self.antialias}")


LRA_32 = Settings()
LRA_128 = Settings(size=128, distractor_length=4, n_distractors=8, dash_length=5, thickness=1.5, margins=(2, 3), marker_radius=3.0,
                   seed_distance=20, continuity=1.8, contour_contrast=0.9, distractor_contrast=0.9)


class Dashes(NamedTuple):
    """All possible dashes, as patches around the pixel from which a dash is drawn.

    The first 360 are for the first dash of a contour, one for each degree from -180 to 179. The others are for its further dashes, one for
    each of the `steps`.
    """

    orientation: np.ndarray  # (n,), radians, the direction in which a contour continues after the dash
    line: np.ndarray  # (n, patch, patch), 0 to 1, the dash as it is drawn
    mask: np.ndarray  # (n, patch, patch), 0 to 1, the dash thickened by the margin
    steps: np.ndarray  # (n - 360, 2), offsets from a pivot to the far end of the next dash
    footprints: list[np.ndarray]  # for each of the first 360: offsets (m, 2) of the pixels that must be free
    begins: np.ndarray  # bool (360,), whether the footprint reaches into the image from each of its corners
    cross: np.ndarray  # (m, 2), offsets no longer than the margin


class Contours(NamedTuple):
    """Growing contours, one or two in each image. The shapes of all fields begin with (images, contours), written as ... below."""

    pivot: np.ndarray  # (..., 2), the pixel at which the last dash turned
    orientation: np.ndarray  # (...), radians, the direction of the last dash
    at: np.ndarray  # (..., dashes, 2), the pixels from which dashes are drawn
    dash: np.ndarray  # (..., dashes), their numbers in Dashes

    def take(self, rows: np.ndarray) -> "Contours":
        return Contours(*(x[rows] for x in self))


def _moved(at: np.ndarray, orientation: np.ndarray, distance: float) -> np.ndarray:
    """The pixels (row, column) at a distance from pixels (..., 2) in the direction `orientation` (radians), rounded up."""
    along = np.stack([np.sin(orientation), np.cos(orientation)], -1)
    return np.ceil(at + distance * along).astype(int)


def _shrunk(large: np.ndarray, size: int) -> np.ndarray:
    """A lower resolution of an image: float32 (size, size) with values from 0 to 1, from values between 0 and 255."""
    from PIL import Image

    return np.asarray(Image.fromarray(large.astype(np.uint8)).resize((size, size), Image.Resampling.LANCZOS), np.float32) / 255


def _disc(radius: int) -> np.ndarray:
    """The offsets (n, 2) of all pixels within the radius."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(y**2 + x**2 <= radius**2) - radius


@functools.lru_cache(maxsize=8)
def _dashes(settings: Settings, margin: int) -> Dashes:
    from PIL import Image, ImageDraw

    radius, scale = settings.dash_length + margin, settings.antialias
    angle = np.deg2rad(np.arange(0, 360, 360 / (2 * radius * np.pi)))
    steps = np.unique(np.floor(radius * np.stack([np.sin(angle), np.cos(angle)], -1)).astype(int), axis=0)
    onward = np.concatenate([np.deg2rad(np.arange(-180, 180)), np.arctan2(steps[:, 0], steps[:, 1])])
    drawn = np.concatenate([onward[:360], onward[360:] - np.pi])  # a step's dash is drawn from its far end
    half = radius + math.ceil(settings.thickness)
    centre = half * scale
    large, near = 2 * centre + 1, _disc(margin * scale)
    lines, masks = [], []
    for y, x in _moved(np.array([centre, centre]), drawn, settings.dash_length * scale):
        canvas = Image.new("L", (large, large))
        ImageDraw.Draw(canvas).line([(centre, centre), (int(x), int(y))], fill=255, width=round(settings.thickness * scale))
        line = np.asarray(canvas)
        mask = np.zeros_like(line)
        wide = (np.argwhere(line)[:, None] + near).reshape(-1, 2)
        wide = wide[((wide >= 0) & (wide < large)).all(1)]
        mask[wide[:, 0], wide[:, 1]] = 255
        lines.append(_shrunk(line, 2 * half + 1))
        masks.append(_shrunk(mask, 2 * half + 1))
    # as in the original program, a footprint lies one pixel below and right of its dash and is cut at the radius
    cut = slice(half - 1 - radius, half + radius)
    footprints = [np.argwhere(mask[cut, cut] > 0.999) - radius for mask in masks[:360]]
    begins = np.array([all(((footprint * corner) >= 0).all(1).any() for corner in itertools.product((-1, 1), repeat=2))
                       for footprint in footprints])
    return Dashes(onward, np.stack(lines), np.stack(masks), steps, footprints, begins, _disc(margin))


@functools.lru_cache(maxsize=8)
def _starts(settings: Settings, margin: int) -> list[np.ndarray]:
    """For each of the 360 first dashes: the pixels (n, 2) from which an image's first contour may begin with it."""
    dashes = _dashes(settings, margin)
    free = np.zeros((settings.size, settings.size), bool)
    free[(slice(2 * settings.seed_distance, settings.size - 2 * settings.seed_distance),) * 2] = True
    return [np.array([at for at in np.argwhere(free & begins) if free[tuple((at + footprint).T)].all()], int).reshape(-1, 2)
            for footprint, begins in zip(dashes.footprints, dashes.begins, strict=True)]


class Artist:
    """Draws images with one margin. They have a rim of half a patch, so that no dash needs clipping."""

    def __init__(self, settings: Settings, margin: int, rng: np.random.Generator):
        self.settings, self.margin, self.rng = settings, margin, rng
        self.dashes, self.starts = _dashes(settings, margin), _starts(settings, margin)
        self.rim = self.dashes.line.shape[-1] // 2
        self.inside = slice(self.rim, self.rim + settings.size)
        side = settings.size + 2 * self.rim
        self.blank = np.zeros((side, side), np.float32)
        self.blank[self.inside, self.inside] = 1
        self.blank[(slice(self.rim + settings.padding, self.rim + settings.size - settings.padding),) * 2] = 0
        self.span = np.arange(2 * self.rim + 1)

    def within(self, at: np.ndarray) -> np.ndarray:
        """bool (...), whether pixels (..., 2) lie in the image."""
        return ((at >= 0) & (at < self.settings.size)).all(-1)

    def window(self, images: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, ...]:
        """The indices of a patch in each of these images, around pixels (images, 2)."""
        return images[:, None, None], (at[:, :1] + self.span)[:, :, None], (at[:, 1:] + self.span)[:, None, :]

    def occupy(self, mask: np.ndarray, images: np.ndarray, at: np.ndarray, dash: np.ndarray) -> None:
        index = self.window(images, at)
        mask[index] = np.maximum(mask[index], self.dashes.mask[dash])

    def draw(self, image: np.ndarray, contours: Contours, contrast: float) -> None:
        """Draws all dashes of the contours into the images, in place."""
        for at, dash in zip(contours.at.reshape(len(image), -1, 2).swapaxes(0, 1), contours.dash.reshape(len(image), -1).T, strict=True):
            index = self.window(np.arange(len(image)), at)
            image[index] = np.maximum(image[index], self.dashes.line[dash] * np.float32(contrast))

    def begin(self, tails: np.ndarray, degrees: np.ndarray, length: int) -> tuple[Contours, np.ndarray]:
        """Contours with a first dash from tails (images, contours, 2), and bool (images,), whether an image's dashes and pivots lie in it.

        degrees: int (images, contours), the numbers of the dashes, below 360. length: the number of dashes that there is room for.
        """
        orientation = self.dashes.orientation[degrees]
        head = _moved(tails, orientation, self.settings.dash_length)
        pivot = _moved(head, orientation - np.pi, self.settings.dash_length + self.margin)
        at, dash = np.zeros((*degrees.shape, length, 2), int), np.zeros((*degrees.shape, length), int)
        at[..., 0, :], dash[..., 0] = tails.clip(0, self.settings.size - 1), degrees
        return Contours(pivot, orientation, at, dash), (self.within(tails) & self.within(head) & self.within(pivot)).all(1)

    def extend(self, mask: np.ndarray, images: np.ndarray, contours: Contours, which: int, step: int) -> np.ndarray:
        """Adds the dash number `step` to a contour of each image, in place. Returns bool (images,), whether there was room for it.

        images: the numbers of the contours' images among the masks. The dash before `step` is marked in these. The contours of images
        without room are not valid.
        """
        settings, dashes, rows = self.settings, self.dashes, np.arange(len(images))
        orientation = contours.orientation[:, which]
        pivot = _moved(contours.pivot[:, which], orientation, settings.dash_length + 2 * self.margin)
        ends = pivot[:, None] + dashes.steps
        inside = self.within(ends)
        ends = ends.clip(0, settings.size - 1)
        side = mask.shape[-1]
        flat = images[:, None] * side**2 + (ends[..., 0] + self.rim) * side + ends[..., 1] + self.rim  # (images, steps)
        taken = mask.reshape(-1)[flat[..., None] + dashes.cross @ (side, 1)].max(2)
        turn = np.abs(dashes.orientation[360:] - orientation[:, None])
        turn = np.minimum(np.minimum(turn, 2 * np.pi - turn) * settings.continuity, np.pi / 2)
        weight = np.where(inside, (1 - taken) * np.cos(turn) ** 2, 0).clip(min=0)
        cumulative = np.cumsum(weight, 1)
        chosen, good = np.zeros(len(images), int), np.zeros(len(images), bool)
        open_rows = np.flatnonzero(cumulative[:, -1] >= 1e-4)
        for _ in range(TRIES):
            pick = self.rng.random(len(open_rows)) * cumulative[open_rows, -1]
            chosen[open_rows] = (cumulative[open_rows] > pick[:, None]).argmax(1)
            at = ends[open_rows, chosen[open_rows]]
            in_mask, y, x = self.window(images[open_rows], at)
            sums = mask[in_mask, y, x] + dashes.mask[360 + chosen[open_rows]]
            in_image = (y >= self.rim) & (y < self.inside.stop) & (x >= self.rim) & (x < self.inside.stop)
            free = np.where(in_image, sums, 0).max((1, 2)) < OVERLAP
            good[open_rows[free]] = True
            open_rows = open_rows[~free]
        self.occupy(mask, images, contours.at[:, which, step - 1], contours.dash[:, which, step - 1])
        contours.pivot[:, which], contours.orientation[:, which] = pivot, dashes.orientation[360 + chosen]
        contours.at[:, which, step], contours.dash[:, which, step] = ends[rows, chosen], 360 + chosen
        return good

    def attempts(self) -> tuple[np.ndarray, Contours]:
        """The masks and the contour pairs of those attempts whose contours both reached their full length."""
        rng, settings = self.rng, self.settings
        possible = np.flatnonzero([len(pixels) > 0 for pixels in self.starts])
        if not len(possible):
            raise ValueError(f"no contour can begin with dash_length={settings.dash_length} and a margin of {self.margin}")
        degrees = np.stack([possible[rng.integers(len(possible), size=ATTEMPTS)], rng.integers(360, size=ATTEMPTS)], 1)
        tail = np.stack([self.starts[d][int(u * len(self.starts[d]))] for d, u in zip(degrees[:, 0], rng.random(ATTEMPTS), strict=True)])
        angle = np.deg2rad(rng.integers(360, size=ATTEMPTS))
        other = np.round(tail + settings.seed_distance * np.stack([np.sin(angle), np.cos(angle)], -1)).astype(int)
        pairs, good = self.begin(np.stack([tail, other], 1), degrees, settings.contour_length)
        pairs = pairs.take(np.flatnonzero(good))
        mask, images = self.blank[None].repeat(len(pairs.pivot), 0), np.arange(len(pairs.pivot))
        for step in range(1, settings.contour_length):
            for which in range(2):
                good = np.flatnonzero(self.extend(mask, images, pairs, which, step))
                images, pairs = images[good], pairs.take(good)
        self.occupy(mask, images, pairs.at[:, 1, -1], pairs.dash[:, 1, -1])  # the first contour's last dash is no obstacle for distractors
        return mask[images], pairs

    def free_tails(self, mask: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each image a random pixel (images, 2) from which the dash of this number has room, and bool (images,), whether there is one.

        The second result is also False if less than LEAST_ROOM of the image's pixels are free.
        """
        size, rim = self.settings.size, self.rim
        lined = mask > OCCUPIED
        room = (~lined[:, self.inside, self.inside]).mean((1, 2)) >= LEAST_ROOM
        lined[:, [rim, rim + size - 1], self.inside] = True
        lined[:, self.inside, [rim, rim + size - 1]] = True
        order = np.argsort(degrees, kind="stable")
        blocked = np.zeros((len(degrees), size, size), bool)
        for rows in np.split(order, np.flatnonzero(np.diff(degrees[order])) + 1):
            part = lined[rows]
            worst = np.zeros((len(rows), size, size), bool)
            for y, x in self.dashes.footprints[degrees[rows[0]]] + rim:
                worst |= part[:, y : y + size, x : x + size]
            blocked[rows] = worst
        free = ~blocked.reshape(len(degrees), -1)
        number = free.sum(1)
        pick = (self.rng.random(len(degrees)) * number).astype(int)
        pixel = (np.cumsum(free, 1) > pick[:, None]).argmax(1)
        return np.stack([pixel // size, pixel % size], -1), (number > 0) & room

    def distract(self, image: np.ndarray, mask: np.ndarray) -> None:
        """Draws one distractor in each image in which one of SNAKE_TRIES tries finds room, in place."""
        length, todo = self.settings.distractor_length, np.arange(len(image))
        for _ in range(SNAKE_TRIES):
            degrees = self.rng.integers(0, 360, len(todo))
            begins = self.dashes.begins[degrees]
            rows, degrees = todo[begins], degrees[begins]
            if not len(rows):
                continue
            tail, free = self.free_tails(mask[rows], degrees)
            contours, good = self.begin(tail[:, None], degrees[:, None], length)
            good = np.flatnonzero(free & good)
            rows, contours = rows[good], contours.take(good)
            tried, images = mask[rows], np.arange(len(rows))
            for step in range(1, length):
                good = np.flatnonzero(self.extend(tried, images, contours, 0, step))
                images, contours = images[good], contours.take(good)
            rows = rows[images]
            if len(rows):
                self.occupy(tried, images, contours.at[:, 0, -1], contours.dash[:, 0, -1])
                drawn = image[rows]
                self.draw(drawn, contours, self.settings.distractor_contrast)
                image[rows], mask[rows] = drawn, tried[images]
                todo = np.setdiff1d(todo, rows, assume_unique=True)

    def mark(self, image: np.ndarray, at: np.ndarray) -> None:
        """Draws a disc in each image, around pixels (images, 2), in place."""
        size, scale = self.settings.size, self.settings.antialias
        y, x = np.ogrid[: size * scale, : size * scale]
        for drawn, (row, column) in zip(image[:, self.inside, self.inside], at * scale, strict=True):
            disc = _shrunk(255 * ((y - row) ** 2 + (x - column) ** 2 <= (self.settings.marker_radius * scale) ** 2), size)
            np.maximum(drawn, disc, out=drawn)


def chunk(seed: int | tuple[int, ...], settings: Settings = LRA_32, count: int = CHUNK) -> tuple[np.ndarray, np.ndarray]:
    """Images that share one margin, uint8 (count, size, size), and their classes, int64 (count,)."""
    rng = np.random.default_rng(seed)
    artist = Artist(settings, int(rng.choice(settings.margins)), rng)
    made: list[tuple[np.ndarray, Contours]] = []
    while sum(len(mask) for mask, _ in made) < count:
        made.append(artist.attempts())
    mask = np.concatenate([mask for mask, _ in made])[:count]
    pairs = Contours(*(np.concatenate(parts)[:count] for parts in zip(*(pairs for _, pairs in made), strict=True)))
    image = np.zeros_like(mask)
    artist.draw(image, pairs, settings.contour_contrast)
    for _ in range(settings.n_distractors):
        artist.distract(image, mask)
    label, start = rng.integers(0, 2, (2, count))
    rows = np.arange(count)
    artist.mark(image, pairs.at[rows, start, 0])
    artist.mark(image, pairs.at[rows, np.where(label == 1, start, 1 - start), -1])
    image = image[:, artist.inside, artist.inside]
    return (255 * image / image.max((1, 2), keepdims=True) + 0.5).astype(np.uint8), label
