#!/usr/bin/env python3
"""Prints FILE:1: what, for each circle of imports between files of a crate other than between a module and those in it.

Read are `use` and paths that begin with `crate`, `super` or `self`; inline test modules and files of tests are left out.
Usage: scripts/circles.py CRATE_DIRECTORY..."""
import os
import re
import sys


def modules(source):
    """File of each module of a crate, by the parts of its path."""
    found = {}
    for directory, _, names in os.walk(source):
        for name in names:
            if not name.endswith(".rs"):
                continue
            path = os.path.join(directory, name)
            parts = os.path.relpath(path, source)[:-3].split(os.sep)
            if parts[-1] in ("lib", "main", "mod"):
                parts.pop()
            if not any(part == "tests" or part.endswith("_tests") for part in parts):
                found[tuple(parts)] = path
    return found


def branches(tree):
    """Paths of a `use` with braces."""
    match = re.match(r"^([^{}]*)\{(.*)\}$", tree.strip(), re.S)
    if not match:
        return [tree.strip()]
    found, depth, part = [], 0, ""
    for char in match.group(2) + ",":
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            found += [match.group(1) + rest for rest in branches(part)] if part.strip() else []
            part = ""
        else:
            part += char
    return found


def imports(module, path, files):
    """Modules that a file names."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    tests = re.search(r"^#\[cfg\((all\()?test.*\n(pub )?mod \w+ \{", text, re.M)
    text = text[: tests.start()] if tests else text
    text = re.sub(r"//.*", "", text)
    paths = [p for use in re.findall(r"\buse\s+([^;]+);", text) for p in branches(" ".join(use.split()))]
    paths += re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", text)
    for path in paths:
        parts = [part.strip() for part in path.split(" as ")[0].split("::")]
        base = ()
        if parts[0] == "crate":
            parts = parts[1:]
        elif parts[0] in ("super", "self") or module + (parts[0],) in files:
            base = module
            while parts and parts[0] in ("super", "self"):
                base = base[:-1] if parts.pop(0) == "super" else base
        else:
            continue
        target = base + tuple(parts)
        while target and target not in files:
            target = target[:-1]
        if target[: len(module)] != module and module[: len(target)] != target:
            yield target


def circles(edges):
    """Strongly connected components of two or more modules."""

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for following in edges.get(todo.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return seen

    reach = {module: reached(module) for module in edges}
    found = {frozenset(m for m in reach[module] if module in reach.get(m, ())) for module in edges}
    return sorted(sorted(circle) for circle in found if circle)


for crate in sys.argv[1:]:
    files = modules(os.path.join(crate, "src"))
    edges = {module: set(imports(module, path, files)) for module, path in files.items()}
    for circle in circles(edges):
        print(f"{files[circle[0]]}:1: a circle of imports: {', '.join('/'.join(m) for m in circle)}")
