"""Arguments and options that several commands share, with their help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from g2rpo.core.errors import UserError, refuse


def recipe_names(incomplete: str) -> list[str]:
    """Recipes that begin like this, for the shell's completion."""
    from g2rpo.config import recipes as known  # imports pydantic, which `--help` does not need

    return [name for name in known.names() if name.startswith(incomplete)]


TRAINING_PANEL, RESULTS_PANEL, WEIGHTS_PANEL = "Train", "Look at the result", "Weights and servers"
"""Headings of the commands in `g2rpo --help`."""

DRY_RUN = ("--dry-run", "--dryrun")
"""Options that other programs have, and their users look for."""

NAMESAKES = ("prompts", "rewards")
"""Groups of settings that an option is named after."""


class WithSettings(TyperCommand):
    """A command that takes KEY=VALUE: a setting that is given as an option, or an option as a
    setting, is named as it should be written."""

    options_alone = True
    """Whether options are no settings, but for `NAMESAKES`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = ["--resume" if word == "--resume=auto" else word for word in args]
        options = {
            flag: each for each in self.params for flag in each.opts if flag.startswith("--")
        }
        for word in given if self.options_alone else ():
            key, equals, value = word.partition("=")
            flag = f"--{key.replace('_', '-')}"
            if equals and flag in options and key not in NAMESAKES:
                raise UserError(
                    f"{word}: is an option here: {flag}{'' if getattr(options[flag], 'is_flag', False) else f' {value}'}"
                )
        try:
            return super().parse_args(ctx, list(given))  # which is used up
        except Exception as error:  # click's, of which some versions of typer have their own copy
            refused: Any = error
            if hasattr(refused, "option_name") and hasattr(refused, "possibilities"):
                dashed = refused.option_name.replace("_", "-")
                if dashed in options:
                    refused.possibilities = [dashed]
                    raise
                if dashed in DRY_RUN:
                    refused.message += (
                        ". `g2rpo plan RECIPE` checks the settings and tells memory and time; "
                        "`g2rpo check-model MODEL` tries the model"
                    )
                    refused.possibilities = []
                    raise
                key, value = _as_setting(refused.option_name, given, self.settings())
                refused.message += f". Settings are written without dashes: {key}={value}"
                refused.possibilities = refused.possibilities if key == "KEY" else []
            raise

    def settings(self) -> Any:
        """The group of settings."""
        from g2rpo.config.schema import Config

        return Config


class WithSameSettings(WithSettings):
    """`evaluate`, whose options are settings too."""

    options_alone = False

    def settings(self) -> Any:
        from g2rpo.lab.judging import JudgingConfig

        return JudgingConfig


def _as_setting(flag: str, given: Sequence[str], kind: Any) -> tuple[str, str]:
    """The key and value of `kind` that an unknown option may mean."""
    from g2rpo.config.complaints import key_of, keys_of

    unknown = ("KEY", "VALUE")
    for word, after in zip(given, [*given[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        if name != flag:
            continue
        if not equals:
            value = "" if after.startswith("-") else after
        if "=" in value:  # --set KEY=VALUE
            key, _, value = value.partition("=")
            return key, value
        found = key_of(flag.lstrip("-").replace("-", "_"), list(keys_of(kind)))
        return unknown if found is None else (found, value or "...")
    return unknown  # one of joined short options (-hx)


def run_or_newest(run: Path | None, model: str | None) -> Path | None:
    """`run`; if neither that nor a model is named the newest in runs/, which is said."""
    from g2rpo.cli.output import console, say
    from g2rpo.train.run.lock import newest_run

    if run is not None or model is not None or (newest := newest_run()) is None:
        return run
    say(console, f"{newest}: the newest run")
    return newest


def run_or_model(run: Path | None, model: str | None, **of_model: object) -> None:
    """UserError if not one of both is named, and for options `of_model` beside a run."""
    if (run is None) == (model is None):
        raise UserError("name a run, or a pipeline with --model")
    given = [name for name, value in of_model.items() if value is not None] if run else []
    refuse(f"--{name} is for --model; a run has its own" for name in given)


def evaluation_settings(
    run: Path | None, model: str | None, weights: Path | None, base: bool = False, **of_model: Any
) -> dict[str, Any]:
    """The settings of an evaluation of a run, or of a pipeline with the options `of_model`."""
    from g2rpo.lab.evaluate import model_settings, run_settings

    run_or_model(run, model, **of_model)
    if run is not None:
        return run_settings(run, weights, base)
    return {
        **model_settings(str(model), **of_model),
        "weights": str(weights) if weights and not base else None,
    }


def key_values(help: str) -> ArgumentInfo:
    """Any number of KEY=VALUE, shown with `help`, which gives an example of such keys."""
    argument: ArgumentInfo = typer.Argument(metavar="KEY=VALUE", help=help)
    return argument


SETTINGS = (
    "Settings in place of the recipe's: trainer.iterations=100 optim.learning_rate=1e-4. Settings have no dashes; "
    "what begins with -- is an option of the command. `g2rpo recipes NAME` shows a recipe's settings, each with its reason."
)
"""What KEY=VALUE means, as `g2rpo train --help` explains it."""

_RECIPE = typer.Argument(
    metavar="RECIPE",
    help="A recipe's name (see `g2rpo recipes`) or a config.yaml.",
    autocompletion=recipe_names,
)
RecipeOrFile = Annotated[str, _RECIPE]
RecipeOrNone = Annotated[str | None, _RECIPE]

ModelOption = Annotated[
    str | None, typer.Option(help="A diffusers pipeline: a folder, a hub id, 'testbed' or 'words'.")
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="Tuned weights: an adapter/, a transformer/, or a .safetensors file of one."),
]
GuidanceOption = Annotated[
    float | None, typer.Option(help="Guidance scale, with --model; default the model's own.")
]
SizeOption = Annotated[
    int | None, typer.Option(help="Height and width in pixels, with --model; a run has its own.")
]

ControlsOption = Annotated[
    bool,
    typer.Option(
        "--controls",
        help="Also score the base with other noise, steps, guidance and solvers, and the best of 16.",
    ),
]

WithinOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Stop in this time, such as 45s, 90m or 3h, with an evaluation and a checkpoint; `g2rpo resume` goes on "
        "(trainer.max_hours).",
    ),
]
UNITS = {"s": 1, "m": 60, "h": 3600}


def max_hours(within: str | None) -> list[str]:
    """The override of `--within`: ["trainer.max_hours=1.5"] of "90m"; UserError for what is no time."""
    if within is None:
        return []
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", within.strip())
    if found is None or not float(found[1]):
        raise UserError(f"--within {within:.80}: should be a time like 45s, 90m or 3h")
    return [f"trainer.max_hours={float(found[1]) * UNITS[found[2]] / 3600!r}"]


HostOption = Annotated[
    str,
    typer.Option(
        help="The address to serve on; for other machines than this one a token is needed (--token-env)."
    ),
]
TokenOption = Annotated[
    str | None, typer.Option(help="An environment variable that holds the token to ask for.")
]
PortOption = Annotated[int, typer.Option(min=1, max=65535)]
PublicOption = Annotated[
    str | None,
    typer.Option(
        help="The name by which a proxy in front of the page is asked, such as user-space.hf.space. "
        "Whoever the proxy lets in may use the page."
    ),
]

RunDirOption = Annotated[
    Path | None, typer.Option(help="Where the run is kept; default runs/RECIPE.")
]
AcceptOption = Annotated[
    bool,
    typer.Option(
        "--accept-changes",
        help="Continue although the prompts, the model or the code of a reward have changed.",
    ),
]
StepsOption = Annotated[str | None, typer.Option(help="Step counts, like 10,20,50.")]
