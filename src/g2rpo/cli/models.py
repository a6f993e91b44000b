"""Commands about models and finished runs: sample, evaluate, export, report, compare,
check-model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli import options
from g2rpo.cli.output import Output, console, say, warn
from g2rpo.core.errors import UserError, counted

commands = typer.Typer()


def _is_run(word: str) -> bool:
    """Whether a word of the command line is the folder of a run. A prompt or a setting may be too
    long for the name of a file."""
    from g2rpo.train.run.folder import Run

    try:
        return Run(Path(word)).config.is_file()
    except OSError:
        return False


@commands.command(rich_help_panel=options.RESULTS_PANEL)
def sample(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [PROMPT]...",
            help="The folder of a run, for its model and weights, default the newest in runs/; then what to draw.",
        ),
    ] = None,
    model: options.ModelOption = None,
    weights: options.WeightsOption = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompts", help="A file of prompts, one a line or .jsonl.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="An input picture for the prompts given here, for models that edit."),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Leave the tuned weights out.")] = False,
    strength: Annotated[float, typer.Option(help="Scale of a LoRA adapter.")] = 1.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Sampling steps; default the run's.")
    ] = None,
    guidance: options.GuidanceOption = None,
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="noise=0.5, cfg=3 (guidance by hand), negative_prompt=TEXT, guided_steps=3, solver=sde or best_of=4.",
        ),
    ] = None,
    size: options.SizeOption = None,
    seed: Annotated[int, typer.Option(help="Picture i starts from noise (seed, i).")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 16,
    video: Annotated[
        str, typer.Option(help="Files of clips: webp, or mp4 with imageio and ffmpeg.")
    ] = "webp",
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder for the pictures; default samples, or samples-2 ..."),
    ] = None,
) -> None:
    """Draw pictures with a run's model, or any pipeline."""
    from g2rpo.core.data import Prompt
    from g2rpo.data.sources import read_prompts
    from g2rpo.lab.sample import sample as draw
    from g2rpo.lab.sample import sample_config
    from g2rpo.train.run.lock import newest_run, no_run

    words, run = prompts or [], None
    if model is None and words and (_is_run(words[0]) or " " not in words[0] or not newest_run()):
        if not _is_run(words[0]):  # nor a prompt for the newest run
            raise UserError(f"{no_run(words[0])}. A run comes first, or --model; then what to draw")
        run = Path(words.pop(0))
    run = options.run_or_newest(run, model)
    if model is not None and words and _is_run(words[0]):
        raise UserError(
            f"{words[0]} is a run; name it or --model, or write the prompt as text of another kind"
        )
    if image and not words:
        raise UserError(
            "--image belongs to prompts that are given as arguments; a file of prompts names its own pictures"
        )
    asked = [Prompt(text, [str(path) for path in image or []]) for text in words]
    asked += read_prompts(prompt_file) if prompt_file else []
    settings = options.evaluation_settings(run, model, weights, base, guidance=guidance, size=size)
    config = sample_config(
        settings,
        knob or [],
        strength=strength,
        steps=steps,
        seed=seed,
        batch_size=batch_size,
        video=video,
    )
    sampled = draw(asked, config, out, partial(warn, console))
    beside = (
        f"the first {sampled.in_grid} side by side"
        if sampled.in_grid < sampled.count
        else "side by side"
    )
    grid = f", {beside} in {sampled.grid}" if sampled.count > 1 else ""
    price = f", {config.control.price(config.steps)} each" if knob else ""
    say(
        console,
        f"{counted(sampled.count, 'clip' if sampled.clips else 'picture')} in {sampled.folder}{grid}{price}",
    )


@commands.command(cls=options.WithSameSettings, rich_help_panel=options.RESULTS_PANEL)
def evaluate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...",
            help="The folder of a finished run, for its model, weights, held-out prompts and rewards, default the newest in "
            "runs/; then settings, such as policy.dtype=bfloat16 num_prompts=8.",
        ),
    ] = None,
    model: options.ModelOption = None,
    weights: options.WeightsOption = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="A file, hf:OWNER/NAME:SPLIT:COLUMN, testbed:heldout or words:heldout."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Evaluate the first N prompts.")
    ] = None,
    rewards: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between them, or a YAML file like a config's `rewards:`."
        ),
    ] = None,
    steps: options.StepsOption = None,
    guidance: options.GuidanceOption = None,
    size: options.SizeOption = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Picture i starts from noise (seed, i); default the run's, else 0."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pictures at a time.")] = None,
    controls: options.ControlsOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for the results; one already begun is finished. Default evaluation, or evaluation-2 ..."
        ),
    ] = None,
) -> None:
    """Evaluate a model, with and without tuned weights, on prompts it was not trained on."""
    from g2rpo.cli.results import show_evaluation
    from g2rpo.lab import evaluate as command

    run = None
    if overrides and ("=" not in overrides[0] or _is_run(overrides[0])):
        run, overrides = Path(overrides[0]), overrides[1:]
    run = options.run_or_newest(run, model)
    settings = options.evaluation_settings(run, model, weights, guidance=guidance, size=size)
    named = {
        "prompts": prompts,
        "num_prompts": num_prompts,
        "rewards": command.rewards_named(rewards) if rewards else None,
        "steps": command.step_counts(steps) if steps else None,
        "seed": seed,
        "batch_size": batch_size,
    }
    if prompts is not None:
        settings["num_prompts"] = None  # a run's is for its own prompts
    settings |= {key: value for key, value in named.items() if value is not None}
    with Output() as emit:
        judging = command.evaluate(settings, overrides or [], out, controls, emit)
    show_evaluation(judging, console)


@commands.command(rich_help_panel=options.WEIGHTS_PANEL)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    format: Annotated[
        str,
        typer.Option(
            help="diffusers, comfyui, kohya, ai-toolkit or merged (the base model with the weights in it)."
        ),
    ] = "",
    checkpoint: Annotated[
        str | None, typer.Option(help="An iteration, last or best; default the final weights.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A new folder, or a .safetensors file for formats of one; default in RUN/export."
        ),
    ] = None,
    learnt: Annotated[
        bool, typer.Option("--learnt", help="Without the adapter that the run continues.")
    ] = False,
) -> None:
    """Write a run's weights as other programs read them."""
    from g2rpo.lab.export import export as write

    path = write(run, format, checkpoint, out, learnt, partial(warn, console))
    say(console, str(path))


@commands.command(rich_help_panel=options.WEIGHTS_PANEL)
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="On the Hugging Face Hub; made if need be.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
) -> None:
    """Upload a run's weights and their model card."""
    from g2rpo.lab.push import push as upload
    from g2rpo.train.run.folder import Run

    address = upload(run, repository, private=private)
    say(console, f"pushed {Run(run).weights} to {address}")


@commands.command(rich_help_panel=options.RESULTS_PANEL)
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Folders of runs, finished or not; default the newest in runs/.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The page; default RUN/report.html, for several runs report.html."),
    ] = None,
) -> None:
    """Tell whether runs work or worked, and write one HTML page that needs nothing else."""
    from g2rpo.lab.report.history import read_runs, summary_of
    from g2rpo.lab.report.page import state, write_page

    if not runs:
        newest = options.run_or_newest(None, None)
        if newest is None:
            raise UserError("name a run; there is none in runs/")
        runs = [newest]
    read = read_runs(runs)
    for run in read:
        say(console, f"{run.name}: {summary_of(run)[0]} {state(run)}")
    path = write_page(read, out)
    say(console, f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


@commands.command(cls=options.WithSettings, rich_help_panel=options.RESULTS_PANEL)
def compare(
    recipe: options.RecipeOrFile,
    overrides: Annotated[
        list[str] | None, options.key_values("Settings of every run, as of `g2rpo train`.")
    ] = None,
    algorithms: Annotated[
        str, typer.Option(help="Names with commas between them; the recipe's own keeps its values.")
    ] = "",
    cell: Annotated[
        list[str] | None,
        typer.Option(
            help="'NAME: KEY=VALUE ...', a variant of the recipe; budget=N gives it its own. May be given often."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Of a run: iterations=60 or evaluations=100000.")
    ] = "iterations=60",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    steps: Annotated[
        str | None,
        typer.Option(help="Evaluate at step counts like 10,20,50; default: as the runs do."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    controls: options.ControlsOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for all runs; a study already begun there is finished. Default study, or study-2 ..."
        ),
    ] = None,
) -> None:
    """Compare algorithms or variants under one budget, over several seeds."""
    from g2rpo.cli.results import show_study
    from g2rpo.lab.compare import study as words
    from g2rpo.lab.compare.workflow import compare as run
    from g2rpo.lab.evaluate import step_counts

    results = run(
        recipe,
        overrides or [],
        words.parse_cells(algorithms, cell or []),
        words.parse_budget(budget),
        seeds=seeds,
        steps=step_counts(steps) if steps else (),
        jobs=jobs,
        out=out,
        controls=controls,
        emit=Output(),
    )
    show_study(results, console)


@commands.command("check-model", cls=options.WithSettings, rich_help_panel=options.WEIGHTS_PANEL)
def check_model(
    model: Annotated[str, typer.Argument(help="A diffusers pipeline: a folder or a hub id.")],
    overrides: Annotated[
        list[str] | None,
        options.key_values(
            "Settings, as of `g2rpo train`: policy.dtype=bfloat16 policy.height=512"
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="A policy of your own, FILE.py:NAME; default by the pipeline's class."),
    ] = None,
) -> None:
    """Check that a model draws, learns and saves here as in plain diffusers."""
    from g2rpo.cli.results import show_checks
    from g2rpo.lab.check_model import check_model as check

    if not show_checks(check(model, kind, overrides or []), console):
        raise typer.Exit(1)
