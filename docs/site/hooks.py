"""What the site takes from the code itself: the page of the command line, and the tables of settings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lightning_osdp.cli import fit, main
from lightning_osdp.planning.spec.capabilities import DEFAULT_ENGINE

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"^<!-- settings of ([\w.]+) -->\n.*?^<!-- end of settings -->$", re.MULTILINE | re.DOTALL)
FROM_TRAINER = "set by the Trainer"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the command line."""
    files.append(File.generated(config, "reference/cli.md", content=command_line_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the tables of settings."""
    return with_settings(markdown)


def with_settings(markdown: str) -> str:
    """Put the table of today's docstring after each ``<!-- settings of NAME -->``."""
    return MARK.sub(
        lambda found: f"<!-- settings of {found[1]} -->\n\n{settings_table(found[1])}\n\n<!-- end of settings -->",
        markdown,
    )


def write_settings() -> None:
    """Write the tables into the pages, which are also read where they are."""
    for page in sorted(ROOT.joinpath("docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if with_settings(text) != text:
            page.write_text(with_settings(text), encoding="utf-8")


def settings_table(name: str) -> str:
    """Arguments of a class or function, with defaults, from its docstring."""
    module, _, member = name.rpartition(".")
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    found = griffe.visit(module, file, file.read_text(encoding="utf-8"))[member]
    signature = found.parameters if found.is_function else found.members["__init__"].parameters
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for section in found.docstring.parse("google", warnings=False):
        if section.kind is not griffe.DocstringSectionKind.parameters:
            continue
        for parameter in section.value:
            if FROM_TRAINER in parameter.description or "," in parameter.name:
                continue
            default = str(signature[parameter.name].default or "") if parameter.name in signature else ""
            default = default.replace("DEFAULT_ENGINE", repr(DEFAULT_ENGINE)).replace("'", '"')
            meaning = " ".join(parameter.description.replace("``", "`").replace("|", "\\|").split())
            rows.append(
                f"| `{parameter.name}` | {f'`{default}`' if default else ''} | {meaning[:1].upper()}{meaning[1:]} |"
            )
    return "\n".join(rows)


def command_line_page() -> str:
    """Every subcommand with its arguments, as the parser has them."""
    lines = ["# Command line", "", "This page is made from the program's own parser.", ""]
    lines += ["| command | what it does |", "| --- | --- |"]
    lines += [f"| [`osdp {name}`](#osdp-{name}) | {command.help} |" for name, command in main.COMMANDS.items()]
    trained = [f"[`osdp {name}`](#training-with-osdp-fit)" for name in fit.SUBCOMMANDS]
    lines += [f"| {', '.join(trained)} | LightningCLI with this strategy as the default. |", ""]
    for name, command in main.COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"osdp {name}", add_help=False)
        command.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="write JSON instead of text")
        lines += [f"## osdp {name}", "", command.help, "", "| argument | meaning |", "| --- | --- |"]
        lines += [f"| {_names(action)} | {_meaning(action)} |" for action in parser._actions]
        lines.append("")
    return "\n".join([*lines, TRAINING])


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest).upper()
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{name} {value}`".replace(" `", "`") for name in action.option_strings)


def _meaning(action: argparse.Action) -> str:
    words = (action.help or "").replace("%(default)s", str(action.default))
    choices = f" One of {', '.join(f'`{choice}`' for choice in action.choices)}." if action.choices else ""
    needed = " Required." if action.required and action.option_strings else ""
    words = words.replace("|", "\\|")
    if not re.match(r"\w+:", words):  # not a value that is explained
        words = words[:1].upper() + words[1:]
    return f"{words}{'.' * (bool(words) and words[-1] not in '.)')}{choices}{needed}"


TRAINING = """## Training with osdp fit

`osdp fit --config fit.yaml` is [LightningCLI](https://lightning.ai/docs/pytorch/stable/cli/lightning_cli.html) with
this strategy registered, and used unless the file names another one. `osdp validate`, `osdp test` and `osdp predict`
take the same file. Its settings are the arguments of `OSDPStrategy` ([all settings](../guide/settings.md)):

```yaml
--8<-- "examples/cli/fit.yaml"
```

## Exit status

| status | meaning |
| --- | --- |
| 0 | done |
| 1 | nothing fits under the memory limit; the error says what would |
| 2 | bad usage or bad input; one line on the standard error stream says what |

With `--json` the standard output is one JSON document and nothing else.
"""


if __name__ == "__main__":
    write_settings()
