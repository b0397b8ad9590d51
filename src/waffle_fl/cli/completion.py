"""`waffle completion`: print a script that completes commands, methods and flags in bash, zsh or fish."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeAlias

from waffle_fl.cli.menu import COMMANDS, Command
from waffle_fl.errors import WaffleError, suggest

Tree: TypeAlias = dict[tuple[str, ...], list[str]]  # the words typed so far -> the words that may follow


def completion(arguments: Sequence[str]) -> int:
    """Print a completion script: waffle completion bash|zsh|fish."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {shell:<5} {how}" for shell, how in INSTALLED.items())
        print(f"usage: waffle completion SHELL prints a script\n\n{lines}")
        return 0 if arguments else 2
    shell = arguments[0]
    if shell not in SCRIPTS:
        raise WaffleError(f"unknown shell {shell!r}{suggest(shell, SCRIPTS)}")
    print(SCRIPTS[shell](tree()), end="")
    return 0


@cache
def tree() -> Tree:
    """Return all commands, with their methods or subcommands and the flags that their help lists."""
    from waffle_fl.algorithms import ALGORITHMS
    from waffle_fl.cli import deploy

    below: Tree = {("run",): list(ALGORITHMS), ("tune",): list(ALGORITHMS), ("deploy",): list(deploy.COMMANDS)}
    below |= {("deploy", "run"): list(ALGORITHMS), ("completion",): list(SCRIPTS)}
    found: Tree = {(): [*COMMANDS, "--help", "--version"]}
    paths: list[tuple[str, ...]] = [(name,) for name in COMMANDS]
    while paths:
        path = paths.pop()
        found[path] = below.get(path) or _flags(COMMANDS[path[0]], path[1:])
        paths += [(*path, word) for word in below.get(path, ()) if path != ("completion",)]
    return found


def _flags(command: Command, rest: Sequence[str]) -> list[str]:
    """Return the flags in a command's help; only --help if the command needs packages that are not installed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit, WaffleError):
        command([*rest, "--help"])
    return sorted({"--help", *re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text.getvalue())})


def _bash(words: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    paths = " | ".join(f"'{_joined(path)}'" for path in words if path)
    cases = "\n".join(f"        '{_joined(path)}') words='{' '.join(after)}' ;;" for path, after in words.items())
    return f"""_waffle() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" path='' words='' word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
            {paths}) path="$path $word" ;;
            *) break ;;
        esac
    done
    case "$path" in
{cases}
    esac
    COMPREPLY=()
    for word in $(compgen -W "$words" -- "$current"); do
        if [[ $current == -* || $word != -* ]]; then COMPREPLY+=("$word"); fi
    done
}}
complete -o default -F _waffle waffle
"""


def _zsh(words: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(words)}"


def _fish(words: Mapping[tuple[str, ...], Sequence[str]]) -> str:
    paths = " ".join(f"'{_joined(path)}'" for path in words if path)
    cases = "\n".join(
        f"        case '{_joined(path)}'\n            printf '%s\\n' {' '.join(after)}" for path, after in words.items()
    )
    return f"""function __waffle_words
    set -l path ''
    for word in (commandline -opc)[2..-1]
        switch "$path $word"
            case {paths}
                set path "$path $word"
            case '*'
                break
        end
    end
    switch "$path"
{cases}
    end
end
complete -c waffle -a '(__waffle_words)'
"""


def _joined(path: Sequence[str]) -> str:
    """Return a path as the scripts compare it: a space before each word."""
    return "".join(f" {word}" for word in path)


SCRIPTS: dict[str, Callable[[Mapping[tuple[str, ...], Sequence[str]]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
INSTALLED = {
    "bash": "waffle completion bash > ~/.local/share/bash-completion/completions/waffle",
    "zsh": "waffle completion zsh > ~/.waffle-completion.zsh; source it in ~/.zshrc after compinit",
    "fish": "waffle completion fish > ~/.config/fish/completions/waffle.fish",
}
