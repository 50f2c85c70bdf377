"""Build the documentation site: the pages of docs/, and a reference that is made from the code. `make site` calls it.

The pages are copied to build/site/pages with the links of a site, beside a page of the command line from the commands
themselves and one of the public names from their docstrings. A warning of the site generator ends the build.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "site"
PAGES = BUILD / "pages"
BESIDE = {"README.md": "index.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
"""Pages outside of docs/, with their names on the site."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCED = re.compile(r"(^ *```.*\n(?:.*\n)*? *```$)", re.MULTILINE)
# The generator takes no block whose language is followed by a word, such as a test's mark.
_INFO = re.compile(r"\A( *```\w*) .*")


def sources() -> dict[str, Path]:
    """The files of the site that are copied, by their place on it: every page of docs/, and all that pages link to."""
    docs = ROOT / "docs"
    found = {str(path.relative_to(docs)): path for path in sorted(docs.rglob("*.md"))}
    found |= {name: ROOT / path for path, name in BESIDE.items()}
    for path in list(found.values()):
        for _, _, target in _LINK.findall(path.read_text(encoding="utf-8")):
            linked = (path.parent / target.partition("#")[0]).resolve()
            if linked.is_relative_to(docs) and linked.is_file():
                found.setdefault(str(linked.relative_to(docs)), linked)
    return found


def relinked(text: str, path: Path, name: str, places: dict[Path, str]) -> str:
    """A page's text with its links as the site needs them; what is not on the site becomes plain text.

    Args:
        text: of the page.
        path: the page's file.
        name: its place on the site.
        places: each file of the site and its place.
    """

    def link(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        file, hash_, anchor = target.partition("#")
        place = places.get((path.parent / file).resolve())
        if place is None:
            return label
        up = "../" * name.count("/")
        return f"{image}[{label}]({up}{place}{hash_}{anchor})"

    # A link may go over two lines; blocks of code, which stand at odd places, have none.
    parts = _FENCED.split(text)
    return "".join(_INFO.sub(r"\1", part) if place % 2 else _LINK.sub(link, part) for place, part in enumerate(parts))


def command_line() -> str:
    """The page of all commands and their options, from the commands themselves."""
    from tutti.cli.app import build_app

    text = build_app().generate_docs(output_format="markdown")
    # The generator of the page leaves the dashes of an option out of its links, and not out of its heading.
    text = text.replace("(#tutti-install-completion)", "(#tutti---install-completion)")
    # It puts a command's name before a usage line that begins with it.
    text = re.sub(r"^tutti ((?:\w+ )?\w+) \1 ", r"tutti \1 ", text, flags=re.MULTILINE)
    return text.replace("# tutti\n", "# Command line\n", 1)


def public_names() -> str:
    """The page of all public names of ``tutti``, by the module that defines them, from their docstrings."""
    import tutti

    rooms: dict[str, list[str]] = defaultdict(list)
    for name in sorted(tutti.__all__):
        value = getattr(tutti, name)
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module.startswith("tutti."):
            rooms[module].append(name)
    lines = ["# Python", "", "The public names of `tutti`, by the module that defines them.", ""]
    for module, names in sorted(rooms.items()):
        lines += [f"## {module}", ""]
        for name in names:
            lines += [f"::: {module}.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def navigation(known: set[str]) -> list[dict[str, list[str]]]:
    """The sections of the site with their pages; exits with a message for a page that is in none or does not exist."""
    table = tomllib.loads((ROOT / "docs" / "site" / "navigation.toml").read_text(encoding="utf-8"))
    found = []
    for section in table["section"]:
        inside = [name for name in sorted(known) if name.startswith(tuple(section.get("beginnings", ())))]
        found.append({section["title"]: [*section["pages"], *inside]})
    listed = [name for section in found for pages in section.values() for name in pages]
    if wrong := (set(listed) ^ known) | {name for name in listed if listed.count(name) > 1}:
        sys.exit(f"docs/site/navigation.toml and the pages differ, or name a page twice: {', '.join(sorted(wrong))}")
    return found


def toml_lines(sections: list[dict[str, list[str]]]) -> Iterator[str]:
    """The lines of the generator's configuration."""
    yield "[project]"
    yield 'site_name = "tutti"'
    yield 'site_description = "One PyTorch model, trained by many devices as if by one"'
    yield f"docs_dir = {json.dumps(PAGES.name)}"
    yield 'site_dir = "html"'
    yield "nav = ["
    for section in sections:
        for title, pages in section.items():
            yield f"  {{ {json.dumps(title)} = {json.dumps(pages)} }},"
    yield "]"
    yield from (ROOT / "docs" / "site" / "settings.toml").read_text(encoding="utf-8").splitlines()
    yield "[project.plugins.mkdocstrings.handlers.python]"
    yield f"paths = {json.dumps([str(ROOT / 'src')])}"
    yield "[project.plugins.mkdocstrings.handlers.python.options]"
    yield 'docstring_style = "google"'
    yield "show_source = false"
    yield "show_root_heading = true"
    yield 'members_order = "source"'
    yield "heading_level = 3"


def main() -> int:
    """Make all pages, and build the site; return the generator's exit code."""
    shutil.rmtree(BUILD, ignore_errors=True)
    files = sources()
    places = {path.resolve(): name for name, path in files.items()}
    for name, path in files.items():
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(relinked(path.read_text(encoding="utf-8"), path, name, places), encoding="utf-8")
        else:
            shutil.copy(path, target)
    reference = {"reference/command-line.md": command_line(), "reference/api.md": public_names()}
    for name, text in reference.items():
        (PAGES / name).parent.mkdir(exist_ok=True)
        (PAGES / name).write_text(text, encoding="utf-8")
    sections = navigation({name for name in (*files, *reference) if name.endswith(".md")})
    configuration = BUILD / "zensical.toml"
    configuration.write_text("\n".join(toml_lines(sections)) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(configuration)]
    code = subprocess.run(command, cwd=BUILD).returncode
    if code == 0:
        print(f"{len(list((BUILD / 'html').rglob('*.html')))} pages in {(BUILD / 'html').relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
