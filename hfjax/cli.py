# SPDX-License-Identifier: Apache-2.0
"""The command line: `hfjax train`, `plan`, `graph`, `export` and `calibrate`."""

import argparse
import logging
import os
import signal
import sys
import traceback
import warnings
from typing import Any

from hfjax.console import let_go, say
from hfjax.files import printable

COMMANDS = {
    "train": "train ALGORITHM [--config FILE.toml] [--model ...] [--SECTION.KEY VALUE ...]    "
    "ALGORITHM is ppo, grpo, dpo, ..., a module or a .py file; train ppo --help lists its settings",
    "plan": "plan ALGORITHM [--devices 16xa100-80g] [--model llama2-7b] [--KEY VALUE ...]    the "
    "best placements, without a device; plan ppo --help lists its settings",
    "graph": "graph ALGORITHM [--algorithm.KEY VALUE ...]    the calls of one step, and what each "
    "waits for",
    "export": "export RUN DIR [--best]    the actor (or reward model) of a run's last checkpoint, "
    "or of the one that keep_best keeps, in Hugging Face format",
    "calibrate": "calibrate [--out FILE.toml] [--name NAME] [--devices N]    times this host, and "
    "writes it down as a device; N: so many simulated on CPU",
}
ALIASES = {"--data": "--data.train", "--eval": "--data.eval"}
FORM = "write --SECTION.KEY VALUE, and --KEY or --no-KEY for a switch"
HELP = ("-h", "--help")
USAGE = "hfjax: reinforcement learning of language models\n\n" + "\n".join(
    f"  hfjax {line}" for line in COMMANDS.values()
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 0, 2 for settings that cannot work, 1 for failures.

    After Ctrl-C 130, after SIGTERM 143.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in HELP:
        print(USAGE)
        return 0
    logging.basicConfig(level=logging.WARNING, handlers=[_handler()])
    # Processes started here exec at once, so that JAX's threads cannot be caught in a fork.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        print(f"hfjax: unknown command {command!r}; use one of {', '.join(COMMANDS)}")
        return 2
    if rest and rest[0] in HELP:
        print(f"hfjax {COMMANDS[command]}")
        return 0
    from hfjax.controller.worker import RoleError
    from hfjax.saving import SaveError

    try:
        commands = {"train": train, "plan": plan, "graph": graph, "export": export}
        (commands | {"calibrate": calibrate})[command](rest)
    except ValueError as error:
        if os.environ.get("HFJAX_TRACEBACK"):
            say(traceback.format_exc())
        say(printable(f"hfjax {' '.join(arguments[:2])}: {error}"))
        return 2
    except RoleError as error:
        if os.environ.get("HFJAX_TRACEBACK"):
            say(traceback.format_exc())
        if not error.refusal and error.__cause__ and "Traceback" not in str(error):
            # of a role in this process: where it was; what it was is in the message
            cause = "".join(traceback.format_exception(error.__cause__)[:-1])
            say(printable(cause))
        say(printable(f"hfjax {' '.join(arguments[:2])}: {error}"))
        return 2 if error.refusal else 1
    except SaveError as error:
        say(f"hfjax {' '.join(arguments[:2])}: {error}")
        return 1
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        told = "interrupted" if number == signal.SIGINT else "terminated"
        say(f"hfjax {command}: {told}")
        return 128 + number
    finally:
        let_go()
    return 0


def _handler() -> logging.Handler:
    """Warnings in a line; what models or files wrote in them steers no terminal."""

    class Printable(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Printable("%(levelname)s %(message)s"))
    return handler


def train(arguments: list[str]) -> None:
    """Reads the settings of ALGORITHM's run and runs it."""
    from hfjax import run

    module = named_algorithm(arguments)
    run.train(module, parse(module, arguments[1:]))


def graph(arguments: list[str]) -> None:
    """Prints the dataflow of ALGORITHM under its settings."""
    from hfjax.algorithm import dataflow
    from hfjax.controller.graph import text

    module = named_algorithm(arguments)
    config = parse(module, arguments[1:], "graph")
    scores = [n for n in ("reward", "cost") if getattr(getattr(config, n, None), "function", "")]
    print(text(dataflow(module, config.algorithm, scores)))


def plan(arguments: list[str]) -> None:
    """Prints the best placements of ALGORITHM on devices that need not be here."""
    import tyro

    from hfjax.algorithm import algorithm_name
    from hfjax.mapping.plan import plan as planned
    from hfjax.mapping.plan import plan_class

    module = named_algorithm(arguments)
    cls = plan_class(module)
    check_options(cls, arguments[1:])
    prog = f"hfjax plan {algorithm_name(module)}"
    conf = (tyro.conf.AvoidSubcommands,)
    print(planned(module, tyro.cli(cls, prog=prog, args=arguments[1:], config=conf)))


def named_algorithm(arguments: list[str]) -> Any:
    """The module of the algorithm that comes first."""
    from hfjax import algorithm

    if not arguments or arguments[0].startswith("-"):
        names = ", ".join(algorithm.algorithm_names())
        raise ValueError(f"ALGORITHM is missing; use one of {names}, a module or a .py file")
    return algorithm.load_algorithm(arguments[0])


def parse(module: Any, arguments: list[str], command: str = "train") -> Any:
    """Settings: defaults, the embedded model's recipe, --config, then the command line."""
    import tyro

    from hfjax.algorithm import algorithm_name
    from hfjax.config import read_toml
    from hfjax.run import default_config

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default="")
    first.add_argument("--model")
    known, _ = first.parse_known_args(arguments)
    file = read_toml(known.config) if known.config else {}
    model = known.model or file.get("model", "embedded")
    rest = [alias(argument) for argument in _without(arguments, "--config")]
    own = {argument[2:].split("=")[0].replace("-", "_") for argument in rest}
    base = default_config(module, model, known.config, own=own)
    check_options(type(base), rest)
    prog = f"hfjax {command} {algorithm_name(module)}"
    return tyro.cli(
        type(base),
        prog=prog,
        default=base,
        args=rest,
        config=(tyro.conf.AvoidSubcommands,),
    )


def alias(argument: str) -> str:
    """--data FILE is short for --data.train FILE, --resume and others stay as they are."""
    name, equals, value = argument.partition("=")
    return f"{ALIASES.get(name, name)}{equals}{value}"


def check_options(cls: type, arguments: list[str]) -> None:
    """Refuses options that are no settings, and values that belong to no option."""
    from hfjax.config import check_names, setting_names

    settings = setting_names(cls)
    option = ""  # the one before, while it may take a value
    for argument in arguments:
        if not argument.startswith("--"):
            if not option and argument not in HELP:
                raise ValueError(f"command line: {argument!r} follows no option; {FORM}")
            option = ""
            continue
        name, equals, _ = argument[2:].partition("=")
        name = name.replace("-", "_")
        switch = settings.get(name.replace("no_", "", 1)) is bool or name == "help"
        if not switch:
            check_names(cls, [name], where="command line")
        option = "" if equals or switch else name


def _without(arguments: list[str], name: str) -> list[str]:
    """The arguments without option `name` and its value."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == name:
            skip = True
        elif not argument.startswith(f"{name}="):
            kept.append(argument)
    return kept


def export(arguments: list[str]) -> None:
    """Writes the actor of a run in Hugging Face format."""
    from hfjax.rundir import export_run

    where = [argument for argument in arguments if argument != "--best"]
    if len(where) != 2 or where[0].startswith("-") or where[1].startswith("-"):
        raise ValueError("export takes RUN, a run's directory, and DIR, a new one, and --best")
    export_run(*where, best="--best" in arguments)


def calibrate(arguments: list[str]) -> None:
    """Measures this host and writes its table of devices."""
    from hfjax.mapping import calibrate as command

    command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
