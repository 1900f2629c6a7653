"""The `weightsync` command: demo, up, down, status, plan, bench, doctor, and those of `operate`.

Exit codes: 0 success, 1 the thing asked for failed, 2 wrong usage, 130 interrupted. With `--json`, standard
output holds JSON and nothing else; everything for people goes to standard error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.console import Console

from weightsync.protocol.errors import WeightsyncError
from weightsync.service.operate import COMMANDS, watch
from weightsync.service.terminal import Address, Json, Name, err, print_json, warn_of_variables

app = typer.Typer(
    help="Weight synchronisation for RL post-training on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Transport = Annotated[
    Literal["auto", "nixl", "rdt", "object_store"] | None, typer.Option(help="how bytes move; default: the setting's")
]


@app.command()
def demo(
    size: Annotated[Literal["tiny", "small", "base"], typer.Option(help="base is Qwen2.5-0.5B's shape")] = "base",
    versions: Annotated[int, typer.Option(min=1, help="versions to train and publish")] = 5,
    mode: Annotated[Literal["live", "staged"], typer.Option(help="how the trainer publishes")] = "live",
    install: Annotated[Literal["shadow", "in_place"], typer.Option(help="how the workers install")] = "shadow",
    transport: Transport = None,
    json_output: Json = False,
) -> None:
    """Train a real model on two FSDP2 ranks and watch two tensor-parallel workers follow, bit for bit."""
    try:
        from weightsync.service.demo.run import run_demo
    except ImportError as error:
        raise _Refused(f"the demo needs the `demo` extra ({error}); run `pip install 'weightsync[demo]'`") from error
    raise typer.Exit(
        run_demo(
            size=size,
            versions=versions,
            mode=mode,
            install=install,
            transport=transport,
            json_output=json_output,
        )
    )


@app.command()
def up(
    name: Name = "default",
    address: Address = None,
    transport: Transport = None,
    http_host: Annotated[str | None, typer.Option(help="address the HTTP ingress binds to")] = None,
    http_port: Annotated[int | None, typer.Option(help="port of the HTTP ingress; 0 picks a free one")] = None,
    json_output: Json = False,
) -> None:
    """Start a service, and a local Ray cluster if none is running; attach if the service runs already."""
    from weightsync.service.api import check_name, start
    from weightsync.service.local_ray import ensure_cluster, stop_launched_cluster
    from weightsync.service.settings import Settings

    warn_of_variables()
    given = {"transport": transport, "http_host": http_host, "http_port": http_port}
    settings = Settings(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    check_name(name)
    with err.status("connecting to Ray ..."):
        launched = address is None and ensure_cluster()
    try:
        with err.status(f"starting service {name} ..."):
            status = start(name, address, settings).status()
    except BaseException:
        if launched:
            stop_launched_cluster()
        raise
    if json_output:
        print_json(status.model_dump(mode="json"))
        return
    err.print(
        f"service [bold]{name}[/] is up: {status.http_url} (transport {status.transport}: {status.transport_reason})"
    )
    if launched:
        err.print("a local Ray cluster was started for it; `weightsync down` of the last service stops it again")


@app.command()
def down(name: Name = "default", address: Address = None, json_output: Json = False) -> None:
    """Stop a service; stops the local Ray cluster too if `up` launched it and no service is left."""
    from weightsync.service.api import connect, list_services
    from weightsync.service.local_ray import stop_launched_cluster

    connect(name, address).shutdown()
    stopped = not list_services() and stop_launched_cluster()
    if json_output:
        print_json({"service": name, "stopped_ray": stopped})
    else:
        err.print(f"service [bold]{name}[/] is down" + ("; its local Ray cluster is stopped" if stopped else ""))


@app.command()
def status(
    name: Name = "default",
    address: Address = None,
    why: Annotated[bool, typer.Option("--why", help="say who waits for whom")] = False,
    follow: Annotated[bool, typer.Option("--watch", help="go on showing it, as `watch` does")] = False,
    json_output: Json = False,
) -> None:
    """Show a service: versions, members, and a running sync."""
    from weightsync.service.api import connect
    from weightsync.service.status_view import render

    if follow:
        watch(name, address, json_output)
        return
    handle = connect(name, address)
    if why:
        lines = handle.why()
        if json_output:
            print_json({"service": name, "why": lines})
        else:
            Console().print("\n".join(lines) or "nobody waits: no sync is running", soft_wrap=True, markup=False)
        return
    state = handle.status()
    if json_output:
        print_json(state.model_dump(mode="json"))
    else:
        Console().print(render(state))


@app.command()
def plan(
    source: Annotated[
        str, typer.Option(help="the trainer's layout, such as split:0/8; `--help-layouts` lists all")
    ] = "",
    target: Annotated[str, typer.Option(help="the worker's layout, or engine/N with --model")] = "",
    shape: Annotated[str | None, typer.Option(help="one parameter of this shape, such as 4096x1024")] = None,
    model: Annotated[str | None, typer.Option(help="tiny, small, base, or a transformers config.json")] = None,
    dtype: Annotated[str, typer.Option(help="element type of --shape")] = "bfloat16",
    policy: Annotated[
        str, typer.Option(help="who serves what several ranks hold, such as adjacency+balance")
    ] = "lowest",
    cost: Annotated[
        list[str] | None, typer.Option(help="a cost of the links to assume, such as descriptor_s=1e-7; repeatable")
    ] = None,
    help_layouts: Annotated[bool, typer.Option("--help-layouts", help="list the layouts and exit")] = False,
    json_output: Json = False,
) -> None:
    """Show what moving weights from one layout to another takes; moves nothing and needs no Ray."""
    from weightsync.protocol.cost_model import LinkCosts
    from weightsync.service.layout_names import describe_kinds
    from weightsync.service.plan_summary import (
        demo_engine,
        describe_model,
        render,
        summarize_layouts,
        summarize_recorded,
    )

    if help_layouts:
        Console(highlight=False).print(describe_kinds().replace("; ", "\n"))
        return
    if not source or not target or (shape is None) == (model is None):
        raise typer.BadParameter("give --source, --target, and either --shape or --model")
    costs = LinkCosts().overridden(dict(_parse_cost(text) for text in cost or ()))
    if shape is not None:
        summary = summarize_layouts([("the parameter", dtype, _parse_shape(shape))], source, target, policy, costs)
    else:
        assert model is not None
        with err.status(f"building {model} ..."):
            config, tensors = describe_model(model)
        kind, _, ranks = target.partition("/")
        with err.status("planning ..."):
            if kind == "engine" and ranks.isdigit() and int(ranks) > 0:
                summary = summarize_recorded(tensors, source, demo_engine(config), int(ranks), policy, costs)
            else:
                summary = summarize_layouts(tensors, source, target, policy, costs)
    if json_output:
        print_json(summary.model_dump(mode="json"))
    else:
        Console().print(render(summary))


@app.command()
def bench(
    suite: Annotated[
        Literal["quick", "full"] | None, typer.Option(help="a set of cases, in place of sizes and counts")
    ] = None,
    sizes: Annotated[str, typer.Option(help="model sizes from 16MB to 4GB, separated by commas")] = "256MB",
    producers: Annotated[str, typer.Option(help="trainer ranks, 1 to 8, separated by commas")] = "2",
    consumers: Annotated[str, typer.Option(help="inference workers, 1 to 8, separated by commas")] = "2",
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, max=8, help="workers per replica; default: all of them; 1: each takes all")
    ] = None,
    run_sizes: Annotated[
        str, typer.Option(help="separated runs of these sizes (512B to 8MiB) in place of a model, one to one")
    ] = "",
    ways: Annotated[str, typer.Option(help="which ways, separated by commas; a wrong one lists them")] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds; default 5, or the suite's")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="counted moves per turn, of which the median is taken")] = 1,
    plot: Annotated[Path | None, typer.Option(help="write a .png or .svg too")] = None,
    json_output: Json = False,
) -> None:
    """Measure weightsync beside bare reads and other ways to move the same bytes into the same workers."""
    from weightsync.service.bench.command import bench_command

    raise typer.Exit(
        bench_command(
            suite_name=suite,
            sizes=sizes,
            producers=producers,
            consumers=consumers,
            tensor_parallel=tensor_parallel,
            run_sizes=run_sizes,
            ways=ways,
            rounds=rounds,
            repeats=repeats,
            plot=plot,
            json_output=json_output,
        )
    )


@app.command()
def doctor(
    address: Address = None,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="time reads between nodes too")] = True,
    json_output: Json = False,
) -> None:
    """Check every node of the cluster, or this machine, for what makes a sync fail or slow, and say what to do.

    Reads between all pairs of nodes are timed, a sample of them with more than 8 nodes. Exit code 0 if there is no
    problem (warnings do not count), 1 otherwise.
    """
    from weightsync.service.doctor.command import doctor_command

    raise typer.Exit(doctor_command(address=address, measure=measure, json_output=json_output))


for command in COMMANDS:
    app.command()(command)


def _parse_cost(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise typer.BadParameter(f"a cost is name=number, such as descriptor_s=1e-7; got {text!r}") from None


def _parse_shape(shape: str) -> tuple[int, ...]:
    sizes = shape.split("x")
    if not all(size.isdigit() for size in sizes):
        raise typer.BadParameter(f"a shape is sizes joined by x, such as 4096x1024; got {shape!r}")
    return tuple(map(int, sizes))


class _Refused(WeightsyncError):
    """A command cannot do what was asked; the message says what to do."""


def main() -> None:
    """Entry point: errors become one line and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        app()
    except KeyboardInterrupt:
        err.print("Interrupted.")
        raise SystemExit(130) from None
    except ValidationError as error:
        for problem in error.errors():
            err.print(f"[red]error:[/] {'.'.join(map(str, problem['loc']))}: {problem['msg']}", soft_wrap=True)
        raise SystemExit(2) from None
    except (WeightsyncError, ConnectionError, ValueError) as error:
        err.print(f"[red]error:[/] {error}", soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
