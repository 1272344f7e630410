"""The pictures of docs/how-it-works.md: python -m bench.pictures draws them anew into docs/pictures."""

from __future__ import annotations

from pathlib import Path

from bench.comparison.svg import INK, MUTED, Picture

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
ORANGE, BLUE, GREY, PALE, RED = "#d9620f", "#5b8bb5", "#e4e7eb", "#f5f7fa", "#b42318"


def pipeline(folder: Path) -> Path:
    """From model and machine to training."""
    words = (
        "Model and one batch are traced, ranks and links measured; with the memory limit they give a plan, which an "
    )
    words += "engine carries out in training."
    picture = Picture(900, 220, "From a model to a plan", words)

    def card(x: float, y: float, title: str, below: str, fill: str = PALE) -> None:
        picture.box(x, y, 170, 52, fill, "#9aa5b1")
        picture.text(x + 85, y + 22, title, 13.5, INK, "middle", bold=True)
        picture.text(x + 85, y + 40, below, 11.5, MUTED, "middle")

    card(20, 16, "Your module", "and one batch")
    card(20, 84, "Your machines", "ranks and links")
    card(20, 152, "Memory limit", "and your constraints")
    card(250, 16, "ModelProfile", "operators, live bytes")
    card(250, 84, "Cluster", "times of collectives")
    card(480, 84, "Search", "fastest plan that fits", "#fdeadb")
    card(710, 84, "Training", "the engine applies it")
    for y in (42, 110):
        picture.line(190, y, 248, y, MUTED, arrow=True)
    picture.text(219, 36, "trace", 11, MUTED, "middle")
    picture.text(219, 104, "time", 11, MUTED, "middle")
    picture.line(420, 42, 500, 82, MUTED, arrow=True)
    picture.line(420, 110, 478, 110, MUTED, arrow=True)
    picture.line(190, 178, 500, 138, MUTED, arrow=True)
    picture.line(650, 110, 708, 110, MUTED, arrow=True)
    picture.text(679, 104, "plan", 11, MUTED, "middle")
    picture.line(795, 136, 795, 186, MUTED)
    picture.line(795, 186, 565, 186, MUTED)
    picture.line(565, 186, 565, 138, MUTED, arrow=True)
    picture.text(680, 204, "trials correct the predictions", 11.5, MUTED, "middle")
    return picture.write(folder / "pipeline.svg")


def modes(folder: Path) -> Path:
    """What a rank holds of an operator during a step."""
    words = (
        "With dp a rank holds the whole weight all the time. With zdp2 it is whole from forward to backward. With zdp "
    )
    words += "it is whole during the forward and during the backward of its operator only."
    picture = Picture(900, 250, "Three sharding modes", words)
    columns = (("forward", 230), ("other operators", 395), ("backward", 560), ("between steps", 725))
    for title, x in columns:
        picture.text(x + 75, 28, title, 13, MUTED, "middle")
    rows = (
        ("dp", "replicated", (1, 1, 1, 1), {2: "all-reduce"}),
        ("zdp2", "sharded, gathered once", (1, 1, 1, 0), {0: "all-gather", 2: "reduce-scatter"}),
        ("zdp", "sharded, gathered twice", (1, 0, 1, 0), {0: "all-gather", 2: "all-gather, reduce-scatter"}),
    )
    for index, (name, meaning, whole, sent) in enumerate(rows):
        y = 44 + index * 66
        picture.text(20, y + 18, name, 16, INK, bold=True)
        picture.text(20, y + 36, meaning, 12, MUTED)
        for column, (_, x) in enumerate(columns):
            picture.box(x, y, 150, 28, GREY)
            picture.box(x, y, 150 if whole[column] else 150 / 4, 28, ORANGE if whole[column] else BLUE)
            picture.text(x + 75, y + 45, sent.get(column, ""), 11, MUTED, "middle")
    picture.text(20, 240, "Filled: what one of 4 ranks holds of the weight.  Grey words: what it sends.", 12, MUTED)
    return picture.write(folder / "modes.svg")


def memory(folder: Path) -> Path:
    """Memory over the moments of a step, under a limit."""
    words = "Memory rises through the forward pass and falls through the backward pass; gathered weights are short "
    words += "bumps on it, and the highest moment has to stay under the limit."
    picture = Picture(900, 270, "Memory over a step", words)
    left, base, step = 60, 232, 50
    states = 52.0
    live = [14, 28, 42, 56, 70, 84, 90, 82, 68, 54, 40, 26, 14, 8]
    gathered = [14, 14, 14, 14, 14, 14, 24, 24, 14, 14, 14, 14, 14, 4]
    picture.line(left, base, left + step * 15, base)
    for index, (bytes_, extra) in enumerate(zip(live, gathered, strict=True)):
        x = left + 8 + index * step
        picture.box(x, base - states, step - 4, states, BLUE, radius=0)
        picture.box(x, base - states - bytes_, step - 4, bytes_, "#f3b482", radius=0)
        picture.box(x, base - states - bytes_ - extra, step - 4, extra, ORANGE, radius=0)
    top = base - states - 90 - 24
    picture.line(left, top - 8, left + step * 15, top - 8, RED, dashed=True)
    picture.text(left + step * 15 + 6, top - 4, "limit", 13, RED)
    picture.text(left + 6.5 * step + 8, 252, "forward  |  backward", 12, MUTED, "middle")
    picture.line(left + 6.5 * step + 8, base, left + 6.5 * step + 8, base + 8)
    for index, (colour, words) in enumerate(
        ((BLUE, "states: depend on the modes"), ("#f3b482", "activations: grow with the batch"), (ORANGE, "gathered"))
    ):
        picture.box(62 + index * 250, 16, 13, 13, colour)
        picture.text(82 + index * 250, 27, words, 12.5)
    return picture.write(folder / "memory.svg")


def slices(folder: Path) -> Path:
    """A large weight, whole and in four slices."""
    words = "Unsharded whole, a large weight takes all its memory at once; in four slices, a quarter at a time."
    picture = Picture(900, 190, "Slices", words)
    picture.text(20, 30, "Whole: gathered at once", 13)
    picture.box(20, 42, 200, 110, ORANGE)
    picture.text(120, 102, "gathered", 13, "white", "middle")
    picture.text(300, 30, "In 4 slices: one is gathered, used and freed after the other", 13)
    for moment in range(4):
        x = 300 + moment * 145
        for piece in range(4):
            now = piece == moment
            picture.box(x, 42 + piece * 28, 120, 25, ORANGE if now else GREY)
            if now:
                picture.text(x + 60, 59 + piece * 28, "gathered", 12, "white", "middle")
        picture.text(x + 60, 172, f"moment {moment + 1}", 12, MUTED, "middle")
    return picture.write(folder / "slices.svg")


def batch_sizes(folder: Path) -> Path:
    """Throughput over the batch size."""
    words = "Throughput rises with the batch size as long as communication is shared by more samples, and falls when "
    words += "memory runs short and more has to be sharded."
    picture = Picture(900, 260, "The search over batch sizes", words)
    left, base = 70, 210
    picture.line(left, base, 840, base, MUTED, arrow=True)
    picture.line(left, base, left, 24, MUTED, arrow=True)
    picture.text(840, base + 22, "batch size", 12, MUTED, "end")
    picture.text(left - 14, 120, "samples per second", 12, MUTED, "middle", turned=True)
    heights = [52, 88, 116, 136, 150, 160, 166, 152, 146, 134, 116, 88]
    points = [(left + 40 + index * 58.0, base - height) for index, height in enumerate(heights)]
    picture.path(points, BLUE)
    for index, (x, y) in enumerate(points):
        picture.circle(x, y, 6 if index == 6 else 4, ORANGE if index == 6 else BLUE)
    picture.text(points[6][0], points[6][1] - 14, "the plan", 13, ORANGE, "middle", bold=True)
    picture.text(points[2][0], 238, "all replicated fits", 12, MUTED, "middle")
    picture.text(points[8][0], 238, "more and more is sharded and recomputed", 12, MUTED, "middle")
    picture.line(points[6][0] + 29, 30, points[6][0] + 29, base, "#9aa5b1", dashed=True)
    picture.text(points[11][0] + 56, points[11][1] + 4, "nothing fits", 12, RED)
    return picture.write(folder / "batch-sizes.svg")


def knapsack(folder: Path) -> Path:
    """One option for each operator."""
    words = (
        "Each operator has options that take more memory and less time, or less memory and more time. One is chosen "
    )
    words += "for each, so that all fit together and the step is shortest."
    picture = Picture(900, 230, "One option for each operator", words)
    names = ("embedding", "attention", "MLP", "head")
    options = (
        ((90, 12), (50, 40), (26, 62)),
        ((70, 30), (40, 44), (24, 60)),
        ((110, 24), (62, 30), (30, 38)),
        ((60, 8),),
    )
    chosen = (1, 0, 2, 0)
    for index, (name, ways) in enumerate(zip(names, options, strict=True)):
        x = 30 + index * 165
        picture.text(x + 60, 26, name, 13.5, INK, "middle", bold=True)
        for number, (size, seconds) in enumerate(ways):
            y = 42 + number * 56
            is_chosen = chosen[index] == number
            picture.box(x - 6, y - 6, 142, 50, "#fdeadb" if is_chosen else "white", ORANGE if is_chosen else GREY)
            picture.box(x, y, size, 14, ORANGE if is_chosen else "#9aa5b1")
            picture.box(x, y + 22, seconds, 14, BLUE if is_chosen else "#cbd2d9")
    picture.box(700, 60, 14, 14, ORANGE)
    picture.text(722, 72, "memory", 13)
    picture.box(700, 86, 14, 14, BLUE)
    picture.text(722, 98, "time added to a step", 13)
    picture.text(700, 132, "Chosen: the options that", 13, MUTED)
    picture.text(700, 150, "fit together and take", 13, MUTED)
    picture.text(700, 168, "the least time.", 13, MUTED)
    picture.text(30, 220, "top: dp    middle: zdp2    bottom: zdp", 12, MUTED)
    return picture.write(folder / "knapsack.svg")


DRAWN = (pipeline, modes, memory, slices, batch_sizes, knapsack)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for draw in DRAWN:
        print(f"written: {draw(FOLDER)}")


if __name__ == "__main__":
    main()
