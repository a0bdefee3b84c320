"""Print how torchrun parses command lines: `ask_torchrun.py MODULE < questions > answers`.

MODULE is `torch.distributed.run`, or another with its names.

A question is `{"argv": [...], "env": {...}}`. The answer has the launch configuration and the
command, or the exception's name. The output also has the parser's table of flags, and the flags
that each abbreviation may mean.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from argparse import ArgumentParser
from typing import Any

# Fields of the configuration that torch's lacks.
OWN = (
    *("event_sinks", "requeue", "restart_timeout", "timers", "native_stacks", "heartbeat"),
    *("preload", "standby", "chaos", "time_limit", "metrics_port", "otel_spans"),
)


def table(parser: ArgumentParser) -> dict[str, Any]:
    """Every flag's spelling with its action."""
    return {
        spelling: {
            "dest": action.dest,
            "default": action.default,
            "nargs": action.nargs,
            "required": action.required,
            "choices": list(action.choices) if action.choices else None,
        }
        for action in parser._actions
        for spelling in action.option_strings or [action.dest]
        if action.dest != "help"
    }


def abbreviations(parser: ArgumentParser) -> dict[str, list[str]]:
    """The flags that each prefix of a spelling may mean."""
    return {
        spelling[:end]: sorted(
            {match[0].dest for match in parser._get_option_tuples(spelling[:end])}
        )
        for spelling in parser._option_string_actions
        for end in range(3, len(spelling))
        if spelling[:end] not in parser._option_string_actions
    }


def answer(run: Any, question: dict[str, Any]) -> dict[str, Any]:
    """The configuration for a command line, by a module with the names of torchrun's."""
    os.environ.update(question["env"])
    try:
        args = run.parse_args(question["argv"])
        config, command, arguments = run.config_from_args(args)
    except SystemExit as error:
        return {"exit": error.code}
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        return {"error": type(error).__name__}
    finally:
        threads = os.environ.pop("OMP_NUM_THREADS", None)
        for name in question["env"]:
            os.environ.pop(name, None)
    logs = config.logs_specs
    return {
        "command": command if isinstance(command, str) else command.__name__,
        "arguments": arguments,
        "omp_num_threads": threads,
        "logs": {
            "class": type(logs).__name__,
            "redirects": shown(logs._redirects),
            "tee": shown(logs._tee),
            "filter": sorted(logs._local_ranks_filter or ()),
        },
        "config": {
            name: shown(getattr(config, name))
            for name in config.__dataclass_fields__
            if name not in ("logs_specs", "numa_options", *OWN)
        },
        "numa": config.numa_options and config.numa_options.affinity_mode.value,
    }


def shown(value: Any) -> Any:
    """Return the value as JSON; flags of the workers' streams become numbers."""
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


if __name__ == "__main__":
    run = importlib.import_module(sys.argv[1])
    questions = json.load(sys.stdin)
    answers = [answer(run, question) for question in questions]
    parser = run.get_args_parser()
    described = {"table": table(parser), "abbreviations": abbreviations(parser)}
    json.dump({**described, "answers": answers}, sys.stdout)
