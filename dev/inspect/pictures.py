"""The picture that teachers draw: the lanes of a warp against addresses, as SVG.

Global memory: lanes above, below them the 32-byte sectors that are fetched, in the order of addresses; hatched is what
is fetched and not asked for. Shared memory: a column for each bank, a row for each 128 bytes; 8-byte accesses go by
half warps, 16-byte ones by quarters, and a bank that one of those needs in several rows is a conflict.

Drawings repeat: a Gallery keeps each once.
"""
from cards import SECTOR, WARP, WAVEFRONT

WORD = 4
BANKS = WAVEFRONT // WORD
WIDTH = 672

# Global memory
LANE_WIDTH = WIDTH / WARP
LANE_TOP, LANE_BOTTOM, STRIP_TOP, STRIP_BOTTOM = 12, 28, 74, 92
LABELLED = 34               # a line of 128 bytes that is as wide has room for its offset
WIDEST_SECTOR = WIDTH / 4    # 32 lanes of 4 bytes: each straight above its own
LINE_GAP = 6                # between sectors of different 128-byte lines

# Shared memory
LEFT, CELL, ROW, HEAD = 104, 16, 16, 16
LABELLED_BYTES = 3          # a cell of so many has room for its lane's number


def short(x):
    return f"{x:.1f}".rstrip("0").rstrip(".")


def rect(x, y, width, height, more=""):
    return f"<rect x={short(x)} y={short(y)} width={short(width)} height={short(height)}{more} />"


def text(x, y, words, kind=""):
    return f"<text x={short(x)} y={short(y)}{f' class={kind}' if kind else ''}>{words}</text>"


def addresses(site):
    """{lane: address} of the lanes that take part."""
    picture = site["picture"]
    return {lane: picture["base"] % WAVEFRONT + offset for lane, offset in enumerate(picture["offsets"]) if offset >= 0}


# ---- global memory

class Strip:
    """Where the sectors that are fetched lie in the picture."""

    def __init__(self, sectors):
        self.sectors = sectors
        gaps = sum(1 for a, b in zip(sectors, sectors[1:]) if self.line(a) != self.line(b))
        gap = min(LINE_GAP, WIDTH / 4 / gaps) if gaps else 0
        self.width = min(WIDEST_SECTOR, (WIDTH - gaps * gap) / len(sectors))
        self.left, x = {}, 0.0
        for i, sector in enumerate(sectors):
            x += gap if i and self.line(sector) != self.line(sectors[i - 1]) else 0
            self.left[sector] = x
            x += self.width

    @staticmethod
    def line(sector):
        return sector * SECTOR // WAVEFRONT

    def x(self, address):
        sector = address // SECTOR
        return self.left[sector] + address % SECTOR / SECTOR * self.width

    def pieces(self, address, size):
        """(x, width) of size bytes, which may lie in several sectors."""
        while size > 0:
            here = min(size, SECTOR - address % SECTOR)
            yield self.x(address), here / SECTOR * self.width
            address, size = address + here, size - here

    def labels(self):
        """(x, offset) of each 128-byte line with room for it."""
        free = 0.0
        for i, sector in enumerate(self.sectors):
            begins = i == 0 or self.line(sector) != self.line(self.sectors[i - 1])
            if begins and self.left[sector] >= free:
                yield self.left[sector], self.line(sector) * WAVEFRONT
                free = self.left[sector] + LABELLED + 6 * (self.line(sector) > 80)


def touched_sectors(lanes, size):
    return sorted({sector for address in lanes.values()
                   for sector in range(address // SECTOR, (address + size - 1) // SECTOR + 1)})


def global_picture(site):
    """(drawing, height, caption)"""
    lanes, size = addresses(site), site["bytes_per_lane"]
    sectors = touched_sectors(lanes, size)
    strip = Strip(sectors)
    parts = ["<use href=#lanes />"] if len(lanes) == WARP else []
    boxes = "".join(f"M{short(strip.left[sector])} {STRIP_TOP}h{short(strip.width)}V{STRIP_BOTTOM}"
                    f"H{short(strip.left[sector])}z" for sector in sectors)
    parts.append(f"<path class=unused d='{boxes}' />")
    drawn = set()
    for lane, address in lanes.items():
        at = (lane + 0.5) * LANE_WIDTH
        cells = "" if address in drawn else "".join(
            rect(x, STRIP_TOP, width, STRIP_BOTTOM - STRIP_TOP, f" class='l{lane} cell'")
            for x, width in strip.pieces(address, size))
        drawn.add(address)
        if len(lanes) < WARP:
            cells += rect(lane * LANE_WIDTH, LANE_TOP, LANE_WIDTH, LANE_BOTTOM - LANE_TOP, f" class=l{lane}")
        first = strip.left[address // SECTOR] + strip.width
        to = min(strip.x(address) + size / SECTOR * strip.width / 2, first)
        parts.append(f"<path class=l{lane} d='M{short(at)} {LANE_BOTTOM}L{short(to)} {STRIP_TOP}' />{cells}")
    if len(lanes) < WARP:
        parts += [text((lane + 0.5) * LANE_WIDTH, LANE_BOTTOM - 5, lane, "" if lane in lanes else "off")
                  for lane in range(WARP)]
    parts += [text(x, STRIP_BOTTOM + 12, f"+{offset:,}", "s") for x, offset in strip.labels()]
    asked = len({byte for address in lanes.values() for byte in range(address, address + size)})
    plural = "s" if len(sectors) > 1 else ""
    does = "fetched" if site["access"] == "load" else "written to"
    caption = f"{len(sectors)} sector{plural} {does}, {asked:,} of their {len(sectors) * SECTOR:,} bytes asked for"
    return "".join(parts), STRIP_BOTTOM + 18, caption


def lane_strip():
    """All 32 lanes, drawn once for all pictures of global memory."""
    cells = "".join(rect(lane * LANE_WIDTH, LANE_TOP, LANE_WIDTH, LANE_BOTTOM - LANE_TOP, f" class=l{lane}")
                    + text((lane + 0.5) * LANE_WIDTH, LANE_BOTTOM - 5, lane) for lane in range(WARP))
    return f"<g id=lanes class=d>{cells}</g>"


# ---- shared memory

def phases(lanes, size):
    """Lanes that go together: all, half warps or quarters."""
    together = WARP * WORD // max(WORD, min(size, 16))
    for first in range(0, WARP, together):
        some = {lane: address for lane, address in lanes.items() if first <= lane < first + together}
        if some:
            yield first, first + together - 1, some


def rows_of_banks(lanes, size):
    """{bank: rows that are asked of it}"""
    rows = {}
    for address in lanes.values():
        for word in range(address // WORD, (address + size - 1) // WORD + 1):
            rows.setdefault(word % BANKS, set()).add(word // BANKS)
    return rows


def pieces_of_rows(address, size):
    """(address, bytes), for bytes that may lie in two rows."""
    here = min(size, WAVEFRONT - address % WAVEFRONT)
    return [(address, here)] + ([(address + here, size - here)] if size > here else [])


def phase_picture(first, last, lanes, size, top, origin):
    """(parts, bottom, wavefronts) of the lanes that go together, from y = top on. origin: the row that others are
    counted from."""
    asked = rows_of_banks(lanes, size)
    rows = sorted(set().union(*asked.values()))
    wavefronts = max(len(found) for found in asked.values())
    y = {row: top + i * ROW for i, row in enumerate(rows)}
    boxes = "".join(f"M{LEFT} {y[row]}h{BANKS * CELL}v{ROW}H{LEFT}z" for row in rows)
    parts = [f"<path class=grid d='{boxes}' />"]
    together = {}
    for lane, address in lanes.items():
        together.setdefault(address, []).append(lane)
    for address, who in together.items():
        for at, width in pieces_of_rows(address, size):
            x, where = LEFT + at % WAVEFRONT * CELL / WORD, y[at // WAVEFRONT]
            conflict = len(asked[at // WORD % BANKS]) > 1
            parts.append(rect(x, where, width * CELL / WORD, ROW, f" class='l{who[0]} bad'" if conflict else
                              f" class=l{who[0]}"))
            if width >= LABELLED_BYTES:
                parts.append(text(x + width * CELL / WORD / 2, where + 11.5, f"{who[0]}{'+' if len(who) > 1 else ''}"))
    if len(rows) > 1 or rows[0] > origin:
        parts += [text(LEFT + BANKS * CELL + 6, y[row] + 11.5, f"+{(row - origin) * WAVEFRONT:,}", "s") for row in rows]
    if first or last < WARP - 1:
        parts.append(text(0, top + 11.5, f"lanes {first}–{last}", "s"))
    else:
        parts.append(text(0, top + 11.5, "all lanes", "s"))
    parts.append(text(LEFT - 8, top + 11.5, f"{wavefronts}×", "e bad" if wavefronts > 1 else "e"))
    return parts, top + len(rows) * ROW + 5, wavefronts


def shared_picture(site):
    """(drawing, height, caption)"""
    lanes, size = addresses(site), site["bytes_per_lane"]
    parts, bottom, wavefronts = ["<use href=#banks />"], HEAD, 0
    origin = min(lanes.values()) // WAVEFRONT
    for first, last, some in phases(lanes, size):
        drawn, bottom, count = phase_picture(first, last, some, size, bottom, origin)
        parts += drawn
        wavefronts += count
    caption = f"{wavefronts} wavefront{'s' if wavefronts > 1 else ''} for {len(lanes)} lanes of {size} bytes"
    return "".join(parts), bottom, caption


def bank_heads():
    heads = "".join(text(LEFT + (bank + 0.5) * CELL, HEAD - 5, bank, "h") for bank in range(BANKS))
    return f"<g id=banks class=d>{text(0, HEAD - 5, 'bank', 's')}{heads}</g>"


# ---- all of them

def has_picture(site):
    picture = site.get("picture")
    return bool(picture) and any(offset >= 0 for offset in picture.get("offsets", []))


class Gallery:
    """Drawings, each once: figure() refers to them, definitions() holds them."""

    def __init__(self):
        self.drawings = {}

    def figure(self, site):
        """HTML of a site's picture with its caption; "" where it has none."""
        if not has_picture(site):
            return ""
        drawing, height, caption = (global_picture if site["space"] == "global" else shared_picture)(site)
        name = self.drawings.setdefault(drawing, f"p{len(self.drawings)}")
        return (f'<figure><figcaption>{caption}</figcaption><div class=scroll><svg class=pic role=img '
                f'aria-label="{caption}" viewBox="0 0 {WIDTH} {short(height)}"><use href=#{name} /></svg></div>'
                f'</figure>')

    def definitions(self):
        hatch = ('<pattern id=hatch width=5 height=5 patternUnits=userSpaceOnUse patternTransform=rotate(45)>'
                 '<rect width=5 height=5 class=ground /><path d="M0 0v5" class=stripe /></pattern>')
        drawings = "".join(f"<g id={name} class=d>{drawing}</g>" for drawing, name in self.drawings.items())
        return (f'<svg class="pic defs" width=0 height=0 aria-hidden=true><defs>{hatch}{lane_strip()}{bank_heads()}'
                f'{drawings}</defs></svg>')


def lane_styles():
    """A colour for each lane; neighbours of a quarter are near each other."""
    return "\n".join(f".l{lane} {{ color: hsl({round(lane * 360 / WARP)} 68% {70 + 8 * (lane % 2)}%) }}"
                     for lane in range(WARP))
