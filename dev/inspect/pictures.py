"""Draws a site's worst request as SVG: the lanes of a warp and the addresses that they access, as PICTURES in page.py
explains. Sectors are in the order of their addresses."""
from cards import SECTOR, WARP, WAVEFRONT
from tables import plural

WORD = 4
BANKS = WAVEFRONT // WORD
WIDTH = 672
LANE = WIDTH / WARP
LANES_BOTTOM, SECTORS_TOP, SECTORS_BOTTOM = 16, 62, 80      # y in the picture of global memory
LEFT, CELL = 104, 16        # in the picture of shared memory: x of bank 0; width and height of a bank


def rect(x, y, width, height, kind):
    return f"<rect x={x:g} y={y:g} width={width:g} height={height:g} class='{kind}' />"


def text(x, y, words, kind=""):
    return f"<text x={x:g} y={y:g} class='{kind}'>{words}</text>"


def addresses(site):
    """Returns {lane: address} of the active lanes, relative to a multiple of 128 bytes."""
    picture = site["picture"]
    return {lane: picture["base"] % WAVEFRONT + offset for lane, offset in enumerate(picture["offsets"]) if offset >= 0}


def pieces(address, size, unit):
    """Splits an access at unit boundaries; yields (index of the unit, first byte in it, number of bytes)."""
    for number in range(address // unit, (address + size - 1) // unit + 1):
        first, last = max(address, number * unit), min(address + size, (number + 1) * unit)
        yield number, first - number * unit, last - first


# ---- global memory

def global_picture(site):
    """Returns (drawing, height, caption)."""
    lanes, size = addresses(site), site["bytes_per_lane"]
    sectors = sorted({sector for address in lanes.values() for sector, *_ in pieces(address, size, SECTOR)})
    width = min(WIDTH / 4, WIDTH / len(sectors))
    left = {sector: i * width for i, sector in enumerate(sectors)}
    height = SECTORS_BOTTOM - SECTORS_TOP
    parts = [rect(x, SECTORS_TOP, width, height, "unused") for x in left.values()]
    for lane in range(WARP):
        parts.append(rect(lane * LANE, 0, LANE, LANES_BOTTOM, f"l{lane}" if lane in lanes else "grid"))
        parts.append(text((lane + 0.5) * LANE, LANES_BOTTOM - 4, lane, "" if lane in lanes else "m"))
    for lane, address in lanes.items():
        boxes = [rect(left[sector] + first / SECTOR * width, SECTORS_TOP, count / SECTOR * width, height, f"l{lane}")
                 for sector, first, count in pieces(address, size, SECTOR)]
        sector, first, count = next(pieces(address, size, SECTOR))
        to = left[sector] + (first + count / 2) / SECTOR * width
        parts += [f"<path class=l{lane} d='M{(lane + 0.5) * LANE:g} {LANES_BOTTOM}L{to:g} {SECTORS_TOP}' />", *boxes]
    used = len({byte for address in lanes.values() for byte in range(address, address + size)})
    verb = "loaded" if site["access"] == "load" else "stored"
    caption = f"{plural(len(sectors), 'sector')} {verb}; {used:,} of their {len(sectors) * SECTOR:,} bytes requested"
    return "".join(parts), SECTORS_BOTTOM + 4, caption


# ---- shared memory

def phases(lanes, size):
    """Yields the parts of a warp that are served together: the warp, half warps or quarters. (name, {lane: address})"""
    together = WARP * WORD // max(WORD, min(size, 16))
    for first in range(0, WARP, together):
        some = {lane: address for lane, address in lanes.items() if first <= lane < first + together}
        if some:
            yield f"lanes {first}–{first + together - 1}", some


def phase_picture(name, lanes, size, top):
    """Draws lanes that are served together below y = top; returns (SVG elements, bottom, wavefronts)."""
    rows_of = {}            # bank -> rows
    for address in lanes.values():
        for word, *_ in pieces(address, size, WORD):
            rows_of.setdefault(word % BANKS, set()).add(word // BANKS)
    rows = sorted(set().union(*rows_of.values()))
    wavefronts = max(map(len, rows_of.values()))
    y = {row: top + i * CELL for i, row in enumerate(rows)}
    parts = [rect(LEFT, y[row], BANKS * CELL, CELL, "grid") for row in rows]
    owners = {}
    for lane, address in lanes.items():
        owners.setdefault(address, []).append(lane)
    for address, owner in owners.items():
        for row, first, count in pieces(address, size, WAVEFRONT):
            x, width = LEFT + first * CELL / WORD, count * CELL / WORD
            conflict = len(rows_of[first // WORD]) > 1
            parts.append(rect(x, y[row], width, CELL, f"l{owner[0]}{' bad' if conflict else ''}"))
            if count >= WORD:
                parts.append(text(x + width / 2, y[row] + 11.5, f"{owner[0]}{'+' if len(owner) > 1 else ''}"))
    parts += [text(0, top + 11.5, name, "s"),
              text(LEFT - 8, top + 11.5, f"{wavefronts}×", "e bad" if wavefronts > 1 else "e")]
    return parts, top + len(rows) * CELL + 5, wavefronts


def shared_picture(site):
    """Returns (drawing, height, caption)."""
    lanes, size = addresses(site), site["bytes_per_lane"]
    parts, bottom, wavefronts = [text(LEFT + (bank + 0.5) * CELL, 11, bank, "m") for bank in range(BANKS)], CELL, 0
    parts.append(text(0, 11, "bank", "s"))
    for name, some in phases(lanes, size):
        drawn, bottom, count = phase_picture(name, some, size, bottom)
        parts += drawn
        wavefronts += count
    caption = f"{plural(wavefronts, 'wavefront')} for {plural(len(lanes), 'lane')} of {plural(size, 'byte')}"
    return "".join(parts), bottom, caption


# ---- all of them

class Gallery:
    """Drawings without duplicates: figure() refers to one, definitions() contains all."""

    def __init__(self):
        self.drawings = {}

    def figure(self, site):
        """Returns the HTML of a site's picture and its caption; "" if the site has none."""
        if not site.get("picture"):
            return ""
        drawing, height, caption = (global_picture if site["space"] == "global" else shared_picture)(site)
        name = self.drawings.setdefault(drawing, f"p{len(self.drawings)}")
        return (f'<figure><figcaption>{caption}</figcaption><div class=scroll><svg class=pic role=img '
                f'aria-label="{caption}" viewBox="0 0 {WIDTH} {height:g}"><use href=#{name} /></svg></div></figure>')

    def definitions(self):
        hatch = ('<pattern id=hatch width=5 height=5 patternUnits=userSpaceOnUse patternTransform=rotate(45)>'
                 '<rect width=5 height=5 class=ground /><path d="M0 0v5" class=stripe /></pattern>')
        drawings = "".join(f"<g id={name} class=d>{drawing}</g>" for drawing, name in self.drawings.items())
        return f"<svg class=defs width=0 height=0 aria-hidden=true><defs>{hatch}{drawings}</defs></svg>"


def lane_styles():
    """Returns one colour per lane; adjacent lanes have similar hues."""
    return "\n".join(f".l{lane} {{ color: hsl({round(lane * 360 / WARP)} 68% {70 + 8 * (lane % 2)}%) }}"
                     for lane in range(WARP))
