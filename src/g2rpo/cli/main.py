"""The command line. Heavy libraries are imported by the command that needs them, so `--help` answers at once."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from g2rpo import __version__
from g2rpo.app.quiet import quiet_libraries
from g2rpo.app.stopping import Stopping, stoppable
from g2rpo.cli import options
from g2rpo.cli.output import Output, console, say
from g2rpo.core.errors import Interrupted, Stopped, UserError, counted, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from g2rpo.app.prediction import Planned
    from g2rpo.config.schema import Config

app = typer.Typer(
    name="g2rpo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
command_of = cache(typer.main.get_command)  # reading the parameters of all commands takes 18 ms

UNUSABLE = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EROFS)
"""What the name of a file or folder may lead to."""


def print_version(asked: bool) -> None:
    if asked:
        print(f"g2rpo {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py|MODULE", help="Code that a config may import; may stand anywhere, and be given often."),
    ] = None,
) -> None:
    """Online RL fine-tuning of flow-matching image generators with Granular-GRPO (G²RPO)."""
    from g2rpo.core.plugins import allow

    for source in plugin or []:
        allow(source)


@app.command(cls=options.WithSettings)
def train(
    recipe: options.RecipeOrNone = None,
    overrides: Annotated[list[str] | None, options.key_values("trainer.iterations=100")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept; default runs/RECIPE.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --run-dir, or begin it if there is none; also --resume=auto.")
    ] = False,
    accept_changes: Annotated[bool, typer.Option("--accept-changes", help="With --resume: as for `g2rpo resume`.")] = False,
    within: options.Within = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="First choose optim.learning_rate by short runs at .25 to 4 times it.")
    ] = False,
    push_to_hub: options.PushToHub = None,
) -> None:
    """Train a model on rewards."""
    if resume and recipe is not None and "=" in recipe:
        overrides, recipe = [recipe, *(overrides or [])], None
    _train(recipe, overrides, run_dir, resume, accept_changes, within, push_to_hub, find_rate)


@app.command("resume", cls=options.WithSettings)
def resume_run(
    run: Annotated[Path, typer.Argument(help="The directory of a run that was interrupted, or that is to go on for longer.")],
    overrides: Annotated[list[str] | None, options.key_values("trainer.iterations=200 sampling.batch_size=32")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although prompts, model or reward code are not those of before.")
    ] = False,
    within: options.Within = None,
    push_to_hub: options.PushToHub = None,
) -> None:
    """Continue a run where it was stopped, with its own config."""
    _train(None, overrides, run, True, accept_changes, within, push_to_hub)


def _train(
    recipe: str | None,
    overrides: list[str] | None,
    run_dir: Path | None,
    resume: bool,
    accept_changes: bool,
    within: str | None,
    push_to_hub: str | None,
    find_rate: bool = False,
) -> None:
    with stoppable("stopped before training began; the same command begins again") as stopping:  # loading is slow
        from g2rpo.app.push import check_push
        from g2rpo.app.train import train as run

        if push_to_hub is not None:
            check_push(push_to_hub)
        with Output() as emit:
            directory = run(
                recipe, overrides or [], run_dir, resume, accept_changes, stopping, within, emit, find_rate, _predict
            )
    if push_to_hub is not None and directory is not None:
        push(directory, push_to_hub)


def _predict(config: Config, ranks: int, prompts: Sequence[str], heldout: Sequence[str]) -> Planned | None:
    from g2rpo.assembly.components import pick_device

    if pick_device(config.policy.device) == "cpu":
        return None
    from g2rpo.lab.plan.prediction import predict

    return predict(config, ranks, prompts, heldout)


@app.command(cls=options.WithSettings)
def plan(
    recipe: options.RecipeOrFile,
    overrides: Annotated[list[str] | None, options.key_values("policy.lora_rank=64")] = None,
    device: Annotated[str | None, typer.Option(help="A card such as h200 or rtx4090; default this machine.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, a device each, that share the prompts.")] = 1,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Of these, on one machine; default up to 8.")] = None,
    network: Annotated[float, typer.Option(min=0.01, help="GB/s that a machine sends to others; 12.5 is 100 Gbit/s.")] = 12.5,
    probe: Annotated[
        bool | None, typer.Option("--probe/--no-probe", help="Time a few calls on this machine; default where that is quick.")
    ] = None,
    cards: Annotated[bool, typer.Option("--cards", help="What fits on every known card, and how.")] = False,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="Overrides that fit a time such as 3h, and what they cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate a run's compute, memory and time before launching it."""
    if cards:
        from g2rpo.cli.plan import show_cards
        from g2rpo.lab.plan.by_card import on_cards

        if device is not None or probe:
            raise UserError("--cards is about every card; leave --device and --probe out")
        rows = on_cards(recipe, overrides or [], ranks, ranks_per_node)
        if as_json:
            say(console, json.dumps({key: row.plain() for key, row in rows.items()}, indent=1))
        else:
            show_cards(recipe, rows, console)
        return
    if within is not None:
        from g2rpo.cli.plan import show_within
        from g2rpo.lab.plan.within import plan_within
        from g2rpo.training.pace import seconds_in

        if ranks > 1 or probe:
            raise UserError("--within plans one process on a card; leave --ranks and --probe out")
        fitted = plan_within(recipe, overrides or [], seconds_in(within), device)
        if as_json:
            say(console, json.dumps(fitted.plain(), indent=1))
        else:
            show_within(fitted, within, console)
        return
    from g2rpo.cli.plan import show_plan
    from g2rpo.lab.plan import answer

    answered = answer.plan(
        recipe,
        overrides or [],
        device=device,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        network=network,
        probe=probe,
    )
    if as_json:
        say(console, json.dumps(answered.plain(), indent=1))
    else:
        show_plan(answered, console)


@app.command("check-model", cls=options.WithSettings)
def check_model(
    model: Annotated[str, typer.Argument(help="A diffusers pipeline: a folder or a hub id.")],
    overrides: Annotated[list[str] | None, options.key_values("policy.dtype=bfloat16 policy.height=512")] = None,
    kind: Annotated[
        str | None, typer.Option(help="A policy of your own, FILE.py:NAME; default by the pipeline's class.")
    ] = None,
) -> None:
    """Check that a model draws, learns and saves here as in plain diffusers."""
    from g2rpo.cli.results import show_checks
    from g2rpo.lab.check_model import check_model as check

    if not show_checks(check(model, kind, overrides or []), console):
        raise typer.Exit(1)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Upload a run's weights and their model card."""
    from g2rpo.app.push import push as upload
    from g2rpo.runs.directory import RunDirectory

    address = upload(run, repository, private=private)
    say(console, f"pushed {RunDirectory(run).weights} to {address}")


@app.command(cls=options.WithSettings)
def encode(
    recipe: options.RecipeOrFile,
    overrides: Annotated[list[str] | None, options.key_values("prompts.cache=FOLDER")] = None,
) -> None:
    """Store the text embeddings of a recipe's prompts ahead of training."""
    from g2rpo.app.encode import encode as run

    with Output() as emit:
        count, new = run(recipe, overrides or [], emit)
    say(console, f"{count} prompts are stored, {new} of them new")


@app.command()
def sample(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN] [PROMPT]...", help="A run directory, for its model and weights; and what to draw."),
    ] = None,
    run: Annotated[Path | None, typer.Option(hidden=True)] = None,
    model: options.Model = None,
    weights: options.Weights = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompts", help="A file of prompts, one a line or .jsonl.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An input picture for the prompts given here, for models that edit.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Leave the tuned weights out.")] = False,
    strength: Annotated[float, typer.Option(help="Scale of a LoRA adapter.")] = 1.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps; default the run's.")] = None,
    shift: Annotated[float | None, typer.Option(help="Time shift of the sampler; default the run's, else the model's.")] = None,
    guidance: options.Guidance = None,
    size: options.Size = None,
    seed: Annotated[int, typer.Option(help="Picture i starts from noise (seed, i).")] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    video: Annotated[str, typer.Option(help="Files of clips: webp, or mp4 with imageio and ffmpeg.")] = "webp",
    out: Annotated[Path | None, typer.Option(help="A new folder for the pictures; default samples, or samples-2 ...")] = None,
) -> None:
    """Draw pictures with a run's model, or any pipeline."""
    from g2rpo.app.evaluate import model_settings
    from g2rpo.app.sample import sample as draw
    from g2rpo.config.resolve import resolve_as
    from g2rpo.config.schema import PolicyConfig
    from g2rpo.core.types import Prompt
    from g2rpo.prompts.sources import read_prompts

    if run is None and model is None and prompts:
        run, prompts = Path(prompts[0]), prompts[1:]
    if image and not prompts:
        raise UserError("--image belongs to prompts that are given as arguments; a file of prompts names its own pictures")
    inputs = [str(path) for path in image or []]
    texts = [*(Prompt(text, inputs) for text in prompts or []), *(read_prompts(prompt_file) if prompt_file else [])]
    policy = None
    if model is not None:
        policy = resolve_as(PolicyConfig, model_settings(model, size, guidance)["policy"], source="--model")
    sampled = draw(
        texts,
        run=run,
        policy=policy,
        weights=weights,
        strength=strength,
        base=base,
        steps=steps,
        shift=shift,
        seed=seed,
        batch_size=batch_size,
        video=video,
        out=out,
    )
    beside = f"the first {sampled.in_grid} side by side" if sampled.in_grid < sampled.count else "side by side"
    grid = f", {beside} in {sampled.grid}" if sampled.count > 1 else ""
    say(console, f"{counted(sampled.count, 'clip' if sampled.clips else 'picture')} in {sampled.folder}{grid}")


@app.command(cls=options.WithSettings)
def evaluate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...",
            help="A finished run, for its model, weights, held-out prompts and rewards; and settings: policy.dtype=bfloat16",
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(hidden=True)] = None,
    model: options.Model = None,
    weights: options.Weights = None,
    prompts: Annotated[
        str | None, typer.Option(help="A file, hf:OWNER/NAME:SPLIT:COLUMN, testbed:heldout or words:heldout.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Evaluate the first N prompts.")] = None,
    rewards: Annotated[str | None, typer.Option(help="Names with commas between them, or a YAML file.")] = None,
    steps: Annotated[str | None, typer.Option(help="Step counts, like 10,20,50.")] = None,
    guidance: options.Guidance = None,
    size: options.Size = None,
    seed: Annotated[int | None, typer.Option(help="Picture i starts from noise (seed, i); default the run's, else 0.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pictures at a time.")] = None,
    controls: options.Controls = False,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for the results; one already begun is finished. Default evaluation, or evaluation-2 ..."),
    ] = None,
) -> None:
    """Evaluate a model, with and without tuned weights, on prompts it was not trained on."""
    from g2rpo.app import evaluate as command
    from g2rpo.cli.results import show_evaluation

    if run is None and overrides and "=" not in overrides[0]:
        run, overrides = Path(overrides[0]), overrides[1:]
    if (run is None) == (model is None):
        raise UserError("name a run, or a pipeline with --model")
    settings = command.run_settings(run) if run else command.model_settings(str(model), size, guidance)
    named = {
        "weights": str(weights) if weights else None,
        "prompts": prompts,
        "num_prompts": num_prompts,
        "rewards": command.named_rewards(rewards) if rewards else None,
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


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    format: Annotated[
        str, typer.Option(help="diffusers, comfyui, kohya, ai-toolkit or merged (the base model with the weights in it).")
    ] = "",
    checkpoint: Annotated[str | None, typer.Option(help="An iteration, last or best; default the final weights.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder, or a .safetensors file for formats of one; default in RUN/export.")
    ] = None,
    learnt: Annotated[bool, typer.Option("--learnt", help="Without the adapter that the run continues.")] = False,
    assistant: Annotated[bool, typer.Option("--assistant", help="With the run's assistant.")] = False,
) -> None:
    """Write a run's weights as other programs read them."""
    from g2rpo.app.export import export as write

    path, rounding = write(run, format, checkpoint, out, learnt, assistant)
    say(console, str(path))
    if rounding is not None and rounding.dtype:
        cost = f"rounding moves weights by {rounding.share:.2%} of what training did (root mean square)"
        say(console, f"stored in {rounding.dtype}: {cost}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The page; default RUN/report.html, for several runs report.html.")] = None,
) -> None:
    """Show what runs did: one HTML page that needs nothing else."""
    from g2rpo.lab.report.page import write_page

    path = write_page(runs, out)
    say(console, f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def demo(
    run: Annotated[Path | None, typer.Argument(help="A finished run: its model, weights, rewards and algorithm.")] = None,
    model: options.Model = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", "--adapter", help="An adapter/, a transformer/, or a .safetensors file.")
    ] = None,
    rewards: Annotated[str | None, typer.Option(help="With --model: names with commas between them, or a YAML file.")] = None,
    guidance: options.Guidance = None,
    size: options.Size = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7860,
    token_env: options.TokenEnv = None,
) -> None:
    """Show base and tuned pictures and a group of the algorithm in the browser."""
    from g2rpo.app.evaluate import named_rewards
    from g2rpo.lab.demo.serve import demo as serve
    from g2rpo.lab.demo.settings import of_model, of_run

    if (run is None) == (model is None):
        raise UserError("name a run, or a pipeline with --model")
    for option, value in (("--rewards", rewards), ("--guidance", guidance), ("--size", size)):
        if run is not None and value is not None:
            raise UserError(f"{option} is for --model; a run has its own")
    table = named_rewards(rewards) if rewards is not None else None
    settings = of_run(run) if run else of_model(str(model), size, guidance, table)
    serve(run, settings, weights, host=host, port=port, token_env=token_env, emit=Output())


@app.command(cls=options.WithSettings)
def teach(
    recipe: Annotated[str, typer.Argument(help="A recipe, a config.yaml, or a run that teach began.")],
    overrides: Annotated[list[str] | None, options.key_values("optim.learning_rate=5e-4")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept; default runs/RECIPE.")] = None,
    votes: Annotated[Path | None, typer.Option(help="Repeat the answers in this file, without a page.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Drawn before and after; default the first held-out prompt.")] = None,
    ahead: Annotated[int | None, typer.Option(min=1, max=8, help="Groups that lie ready while it learns; default 2.")] = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 7861,
    token_env: options.TokenEnv = None,
) -> None:
    """Teach a model by clicking on the best of its pictures, in the browser."""
    from g2rpo.lab.teach.serve import teach as serve

    serve(
        recipe,
        overrides or [],
        run_dir,
        stored=votes,
        prompt=prompt,
        ahead=ahead,
        host=host,
        port=port,
        token_env=token_env,
        emit=Output(),
    )


@app.command(cls=options.WithSettings)
def agree(
    run: Annotated[Path, typer.Argument(help="A run that teach began.")],
    rewards: Annotated[str, typer.Option(help="Names with commas between them, or a YAML file.")],
) -> None:
    """Tell which rewards order the pictures of a teaching session as the person did."""
    from g2rpo.app.evaluate import named_rewards
    from g2rpo.lab.teach.agree import agree as shares

    found = shares(run, named_rewards(rewards))
    for name, share in sorted(found.items(), key=lambda item: -item[1].mean):
        say(console, f"{share} of pairs  {name}  ({counted(share.count, 'group')}; 0.5 is chance)")


@app.command(cls=options.WithSettings)
def compare(
    recipe: options.RecipeOrFile,
    overrides: Annotated[list[str] | None, options.key_values("Of every run.")] = None,
    algorithms: Annotated[str, typer.Option(help="Names with commas between them; the recipe's own keeps its values.")] = "",
    cell: Annotated[
        list[str] | None,
        typer.Option(help="'NAME: KEY=VALUE ...', a variant of the recipe; budget=N gives it its own. May be given often."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Of a run: iterations=60, evaluations=100000 or seconds=300.")] = "iterations=60",
    rates: Annotated[
        str | None, typer.Option(help="Learning rates to choose from, like 1e-4,2e-4; default the recipe's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    pilots: Annotated[int, typer.Option(min=1, help="Runs of each cell at each rate that choose one.")] = 1,
    steps: Annotated[
        str | None, typer.Option(help="Step counts of the evaluations, like 10,20,50; default the recipe's.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    controls: options.Controls = False,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for all runs; a study already begun there is finished. Default study, or study-2 ..."),
    ] = None,
) -> None:
    """Compare algorithms or variants under one budget, each at its best learning rate, over several seeds."""
    from g2rpo.app.evaluate import step_counts
    from g2rpo.cli.results import show_study
    from g2rpo.lab.compare import arguments as words
    from g2rpo.lab.compare.workflow import compare as run

    results = run(
        recipe,
        overrides or [],
        words.parse_cells(algorithms, cell or []),
        words.parse_budget(budget),
        words.parse_rates(rates) if rates else None,
        seeds,
        pilots,
        step_counts(steps) if steps else None,
        jobs,
        out,
        controls,
        Output(),
    )
    show_study(results, console)


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Show one, with the reason for every value.", autocompletion=options.recipe_names)
    ] = None,
) -> None:
    """List the recipes, or explain one."""
    from g2rpo.config import recipes as known

    if name is None:
        column = max(map(len, known.names())) + 2
        for each in known.names():
            lines = textwrap.wrap(known.summary(each), max(20, console.width - column), break_on_hyphens=False)
            console.print(Text.assemble((f"{each:<{column}}", "bold"), f"\n{'':{column}}".join(lines)), highlight=False)
    else:
        console.print(known.text(name), highlight=False, markup=False, soft_wrap=True)


@app.command()
def serve_reward(
    kind: Annotated[str, typer.Argument(help="A reward's name, e.g. hpsv2 or function.")],
    options: Annotated[list[str] | None, options.key_values("path=..., device=cuda")] = None,
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    token_env: options.TokenEnv = None,
) -> None:
    """Serve a reward over HTTP, for a trainer elsewhere."""
    from g2rpo.app.serve import serve_reward as serve

    serve(kind, options or [], host=host, port=port, token_env=token_env, emit=Output())


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line: exit code 0 when done, 2 for wrong input (one message, no traceback), 130 and 75 for a run that
    Ctrl-C or SIGTERM ended early and that can be resumed, 1 for anything else."""
    given = sys.argv[1:] if arguments is None else arguments
    quiet_libraries()
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars of libraries
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a locale without UTF-8 cannot show must not end a run
    try:
        with Stopping("stopped by SIGTERM").handling(signal.SIGTERM):  # commands that can go on later say so themselves
            command_of(app)(plugins_first(given))
    except UserError as error:
        again = f"\n{shlex.join(['g2rpo', *given, *needed])}" if (needed := getattr(error, "options", None)) else ""
        _tell(f"{error}{again}", "bold red")
        sys.exit(2)
    except OSError as error:
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        _tell(f"{str(error.filename)[:300]}: cannot be used ({error.strerror}); name another file or folder", "bold red")
        sys.exit(2)
    except (Stopped, Interrupted) as stop:
        _tell(str(stop), "bold yellow")
        sys.exit(stop.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        remedy = "take smaller pictures or batches, policy.dtype=bfloat16, or a device with more memory (see `g2rpo plan`)"
        _tell(f"out of memory: {str(error).splitlines()[0] if str(error) else 'Python has no more'}\n{remedy}", "bold red")
        sys.exit(2)


def plugins_first(arguments: list[str]) -> list[str]:
    """Moves every `--plugin CODE` to the front, so that it may be given anywhere; UserError for what is no text."""
    first: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise UserError(f"{word!a:.80} is no text in this locale; set LC_ALL=C.UTF-8, and write UTF-8")
        if word == "--plugin":
            first += [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            (first if word.startswith("--plugin=") else rest).append(word)
    return [*first, *rest]


def _tell(message: str, style: str) -> None:
    """Prints a message without markup or control characters, which text from files and servers may contain.

    With G2RPO_TRACEBACK=1 the traceback comes before it.
    """
    if os.environ.get("G2RPO_TRACEBACK"):
        traceback.print_exc()
    message = re.sub(r"(?<=:/)/?[^\s/]*@", "/***@", message)  # user and password in URLs
    shown = "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in message)
    Console(stderr=True).print(Text.assemble(("g2rpo:", style), " ", shown), highlight=False, soft_wrap=True)
