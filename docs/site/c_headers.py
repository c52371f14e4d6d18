"""The directive `c-header`: the declarations of a C header with the comments of the header."""

import pathlib
import re

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

INCLUDE = pathlib.Path(__file__).parents[2] / "include" / "anabranch"
COMMENT = r"/\*(?P<comment>.*?)\*/"
#: What a header consists of. Declarations without a blank line in between belong to the comment above them.
ITEM = re.compile(
    rf"^(?:{COMMENT}|#define (?P<macro>AB_[A-Z_]+) (?P<value>\d+)|AB_API (?P<function>[^;]*);"
    r"|typedef struct (?P<opaque>\w+) \w+;"
    r"|(?:typedef )?(?P<kind>struct|enum) (?P<name>\w*) ?\{(?P<body>.*?)\}[^};]*;|(?P<blank>))$",
    re.DOTALL | re.MULTILINE,
)
#: A field or enumerator with the comment after it on its line, or a comment above fields.
FIELD = re.compile(rf"\s*(?:{COMMENT}|(?P<code>[^;,/]+?)\s*(?:[;,]|$|(?=/))(?: */\*(?P<after>.*?)\*/)?)", re.DOTALL)


def linked(line: str) -> str:
    """A line of plain text as reStructuredText, with links for names of the interface."""
    words = re.split(r"`([^`]+)`|\b((?:ab|AB)_\w+)\b", line)  # plain text, code, name, plain text, ...
    words[::3] = [re.sub(r"([\\*|`_])", r"\\\1", word) for word in words[::3]]
    words[1::3] = [code and f"\\ ``{code}``\\ " for code in words[1::3]]
    words[2::3] = [name and f"\\ :c:expr:`{name}`\\ " for name in words[2::3]]
    return "".join(filter(None, words))


def text_of(comment: str) -> list[str]:
    """A comment as lines of reStructuredText: paragraphs, and indented blocks, which are lists or literal."""
    lines: list[str] = []
    block = ""  # the kind of the indented block that a line belongs to
    for line in re.sub(r"\n *\* ?", "\n", comment.strip()).split("\n"):
        if line.startswith("  "):
            if not block:
                block = "list" if re.match(r" +(-|\d\.) ", line) else "literal"
                lines += ["", ".. code-block:: none", ""] if block == "literal" else [""]
            lines.append(f"   {line}" if block == "literal" else linked(line))
        elif line:
            lines += ["", linked(line)] if block else [linked(line)]
            block = ""
        else:
            lines.append("")
    return lines


def indented(lines: list[str]) -> list[str]:
    """The lines as content of a directive."""
    return ["", *(f"   {line}" if line else "" for line in lines), ""]


def fields_of(kind: str, body: str) -> list[str]:
    """The fields of a struct, or the enumerators of an enum. A comment above belongs to several fields."""
    directive = "member" if kind == "struct" else "enumerator"
    lines: list[str] = []
    above: list[str] = []  # the comment above an enumerator
    for field in FIELD.finditer(body.strip()):
        if field["comment"] and kind == "struct":
            lines += [".. rst-class:: fields", "", *text_of(field["comment"]), ""]
        elif field["comment"]:
            above = text_of(field["comment"])
        else:
            lines += [f".. c:{directive}:: {' '.join(field['code'].split())}", "   :no-contents-entry:"]
            lines += indented(above or text_of(field["after"] or ""))
            above = []
    return lines


def declarations(header: str) -> list[str]:
    """A header as lines of reStructuredText."""
    lines: list[str] = []
    comment: list[str] = []
    functions: list[str] = []

    def end_functions() -> None:
        nonlocal comment
        if functions:
            first, *others = functions
            lines.extend([f".. c:function:: {first}", *(f"                {other}" for other in others)])
            lines.extend(indented(comment))
            functions.clear()
            comment = []

    for item in ITEM.finditer(header[: header.rindex("#ifdef __cplusplus")]):
        if item["function"]:
            functions.append(" ".join(item["function"].split()))
            continue
        end_functions()
        if item["blank"] is not None or item["comment"]:
            lines += [*comment, ""]
            comment = text_of(item["comment"]) if item["comment"] else []
            continue
        if item["macro"]:
            lines += [f".. c:macro:: {item['macro']}", *indented([*comment, "", f"Value: {item['value']}"])]
        elif item["opaque"]:
            lines += [f".. c:struct:: {item['opaque']}", *indented(comment)]
        elif item["name"]:
            lines += [f".. c:{item['kind']}:: {item['name']}", *indented(comment)]
            lines += indented(fields_of(item["kind"], item["body"]))
        else:
            lines += [*comment, "", *fields_of("enum", item["body"])]
        comment = []
    end_functions()
    return [*lines, *comment]


class CHeader(SphinxDirective):
    """`c-header:: NAME` renders include/anabranch/NAME.h."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes of all declarations."""
        path = INCLUDE / f"{self.arguments[0]}.h"
        self.env.note_dependency(str(path))
        return self.parse_text_to_nodes("\n".join(declarations(path.read_text())))
