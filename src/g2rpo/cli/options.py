"""Arguments and options that several commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo


def recipe_names(incomplete: str) -> list[str]:
    """Recipes that begin like this, for the shell's completion."""
    from g2rpo.config import recipes as known  # imports pydantic, which `--help` does not need

    return [name for name in known.names() if name.startswith(incomplete)]


class WithSettings(TyperCommand):
    """A command that takes KEY=VALUE, and names the key of what was given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, ["--resume" if word == "--resume=auto" else word for word in args])
        except Exception as error:  # click's, of which some versions of typer have their own copy
            if (option := getattr(error, "option_name", None)) is not None and hasattr(error, "message"):
                from g2rpo.config.resolve import key_of

                if (key := key_of(option.lstrip("-").replace("-", "_"))) is not None:
                    error.message += f" Settings are given as KEY=VALUE: {key}=..."
            raise


def key_values(help: str) -> ArgumentInfo:
    """Any number of KEY=VALUE, shown with `help`, which gives an example of such keys."""
    argument: ArgumentInfo = typer.Argument(metavar="[KEY=VALUE]...", help=help)
    return argument


_RECIPE = typer.Argument(help="A recipe's name (see `g2rpo recipes`) or a config.yaml.", autocompletion=recipe_names)
RecipeOrFile = Annotated[str, _RECIPE]
RecipeOrNone = Annotated[str | None, _RECIPE]

Model = Annotated[str | None, typer.Option(help="A diffusers pipeline: a folder, a hub id, 'testbed' or 'words'.")]
Weights = Annotated[
    Path | None, typer.Option(help="Tuned weights: an adapter/, a transformer/, or a .safetensors file of one.")
]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale (with --model); default: the model's own.")]
Size = Annotated[int | None, typer.Option(help="Height and width in pixels (with --model).")]

Controls = Annotated[
    bool, typer.Option("--controls", help="Also the base with less first noise, more steps, other guidance and solvers.")
]

Within = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Fit iterations and evaluations to a time for all, such as 90m or 3h."),
]
PushToHub = Annotated[str | None, typer.Option(help="Then upload weights and card to OWNER/NAME.")]

Host = Annotated[str, typer.Option(help="Other machines need a token: see --token-env.")]
TokenEnv = Annotated[str | None, typer.Option(help="An environment variable that holds the token to ask for.")]
