"""Commands with a server: demo, teach, serve-reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from g2rpo.cli import options
from g2rpo.cli.output import Output

commands = typer.Typer()


@commands.command(rich_help_panel=options.RESULTS_PANEL)
def demo(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A finished run: its model, weights, rewards and algorithm; default the newest in runs/."
        ),
    ] = None,
    model: options.ModelOption = None,
    weights: options.WeightsOption = None,
    rewards: Annotated[
        str | None,
        typer.Option(help="With --model: names with commas between them, or a YAML file."),
    ] = None,
    guidance: options.GuidanceOption = None,
    size: options.SizeOption = None,
    host: options.HostOption = "127.0.0.1",
    port: options.PortOption = 7860,
    token_env: options.TokenOption = None,
    public_host: options.PublicOption = None,
) -> None:
    """Show base and tuned pictures and a group of the algorithm in the browser."""
    from g2rpo.lab.demo.command import demo as serve
    from g2rpo.lab.demo.model import config_of_model
    from g2rpo.lab.evaluate import rewards_named
    from g2rpo.lab.serving import Address
    from g2rpo.train.run.folder import Run

    run = options.run_or_newest(run, model)
    options.run_or_model(run, model, rewards=rewards, guidance=guidance, size=size)
    table = rewards_named(rewards) if rewards is not None else None
    config = (
        Run(run).read_config(mention=False)
        if run
        else config_of_model(str(model), size, guidance, table)
    )
    where = Address.checked(host, port, token_env, public_host)
    serve(run, config, weights, where, emit=Output())


@commands.command(cls=options.WithSettings, rich_help_panel=options.TRAINING_PANEL)
def teach(
    recipe: Annotated[
        str, typer.Argument(help="A recipe, a config.yaml, or a run that teach began.")
    ],
    overrides: Annotated[
        list[str] | None,
        options.key_values("Settings, as of `g2rpo train`: optim.learning_rate=5e-4"),
    ] = None,
    run_dir: options.RunDirOption = None,
    votes: Annotated[
        Path | None, typer.Option(help="Repeat the answers in this file, without a page.")
    ] = None,
    host: options.HostOption = "127.0.0.1",
    port: options.PortOption = 7861,
    token_env: options.TokenOption = None,
    public_host: options.PublicOption = None,
) -> None:
    """Teach a model by clicking on the best of its pictures, in the browser."""
    from g2rpo.lab.serving import Address
    from g2rpo.lab.teach.command import teach as serve

    where = Address.checked(host, port, token_env, public_host)
    with Output() as emit:
        serve(recipe, overrides or [], run_dir, stored=votes, where=where, emit=emit)


@commands.command(rich_help_panel=options.WEIGHTS_PANEL)
def serve_reward(
    kind: Annotated[str, typer.Argument(help="A reward's name, e.g. hpsv2 or function.")],
    options: Annotated[
        list[str] | None, options.key_values("Options of the reward, such as device=cuda.")
    ] = None,
    host: options.HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    token_env: options.TokenOption = None,
) -> None:
    """Serve a reward over HTTP, for a trainer elsewhere."""
    from g2rpo.lab.serving import serve_reward as serve

    serve(kind, options or [], host=host, port=port, token_env=token_env, emit=Output())
