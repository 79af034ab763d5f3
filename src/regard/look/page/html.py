"""The page as one HTML file with its script, its style and its data inside; it requests nothing from anywhere.

A served page is the same without the data, for which it asks its own server and no other.
A Content-Security-Policy allows this script and this style, by their hashes, and nothing else: no request, no other
script, whatever the data says. Images come from the page itself alone (blob:): it draws one to save it as PNG.
Script, style and data are deflated, since a notebook stores a page for every view, and script and style are written in
base 85, 5 signs for 4 bytes, which saves 6 % of base 64; a few plain lines unpack them, and the browser runs only what
has the right hash. The title is the only text outside of the data. In a notebook the page is
in a sandboxed frame without access to the notebook.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html as escaping
import re
import zlib
from importlib.resources import files

from .format import Packed

__all__ = ["HEAD", "frame", "html", "page_style", "served_policy", "shell", "text_html"]

#: The first lines of every page; `policy` is all that it may run and load.
HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
"""

_PAGE = (
    HEAD
    + """\
{look}<title>{title}</title>
</head>
<body>
<div id="regard"></div>
<noscript>This page draws its pictures with a script, which is inside the file. Allow scripts to see them.</noscript>
<script type="application/octet-stream" id="regard-style">{style}</script>
<script type="application/octet-stream" id="regard-script">{script}</script>
{data}<script type="module" async>{unpack}</script>
{vectors}</body>
</html>
"""
)

#: The data; and, after the script, which runs before they are read, megabytes of queries and keys of long inputs.
_BLOCK = '<script type="application/octet-stream" id="regard-{}">{}</script>\n'

#: Which look a served page asks its server for.
_LOOK = '<meta name="regard-look" content="{}">\n'

_POLICY = (
    "default-src 'none'; script-src '{}' '{}'; style-src '{}'; {}img-src blob:; base-uri 'none'; form-action 'none'"
)
_POLICY_FORM = (
    re.escape(_POLICY).replace(r"'\{\}'", r"'sha256-[A-Za-z0-9+/=]{44}'").replace(r"\{\}", r"(connect-src 'self'; )?")
)

#: Digits of base 85 that need no escape in HTML, in a quoted attribute and in JSON, where RFC 1924 has & < > and `.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=/?@^_:{|}~"
_OF_RFC_1924 = str.maketrans("&<>`", ",./:")

#: Runs first: unpacks the style and the script.
_UNPACK = """
const digits = "DIGITS", text = (id) => {
  const signs = document.getElementById(id).textContent, packed = new Uint8Array(signs.length / 5 * 4 | 0);
  for (let n = 0; n < signs.length; n += 5) {
    let value = 0;
    for (let m = 0; m < 5; m++) value = value * 85 + digits.indexOf(signs[n + m] ?? "~");
    for (let m = 0; m < 4; m++) packed[n / 5 * 4 + m] = value / 256 ** (3 - m);
  }
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
};
try {
  const style = document.createElement("style"), script = document.createElement("script");
  style.textContent = await text("regard-style");
  script.type = "module";
  script.textContent = await text("regard-script");
  document.head.append(style, script);
} catch (error) {
  document.getElementById("regard").textContent = `This browser is too old to unpack the page: ${error.message}`;
}
""".replace("DIGITS", _DIGITS)

#: The modules of the script, in the order in which they become one.
_MODULES = (
    "data", "numbers", "elements", "stored", "exact", "served", "book", "window", "page", "controls",
    "sentence", "lines", "spotlight", "walk", "play", "square", "atlas", "overview",
    "served_tiles", "tiles", "rulers", "map", "long", "compare", "patterns", "training", "snapshot", "share",
    "scenes", "story", "address", "views",
)  # fmt: skip

#: The height of the page in a notebook until the page says how tall it is, in pixels; the frame can be resized.
HEIGHT = 760

#: Beside the frame in a notebook: gives it the height of its page, and tells the page whether the notebook is dark. A
#: frame without an origin can neither be measured from outside nor look at the notebook.
_FIT = """
(() => {
  const frame = document.currentScript.previousElementSibling;
  // Where the output is a document of its own around this frame, as in marimo, that one gets the height as well.
  const alone = [...document.body.children].every((x) => x === frame || x.localName === "script");
  const outer = alone ? window.frameElement : null;
  const { body } = outer?.ownerDocument ?? document, light = body.dataset.jpThemeLight, name = body.className;
  const theme = light ? (light === "true" ? "light" : "dark") : /vscode-dark|dark-theme/.test(name) ? "dark"
    : /vscode-light|light-theme/.test(name) ? "light" : null;
  addEventListener("message", ({ source, data }) => {
    if (source !== frame.contentWindow || !(data?.regardHeight > 0)) return;
    frame.style.height = `${Math.min(data.regardHeight, 4000)}px`;
    if (outer) outer.style.height = `${document.documentElement.offsetHeight}px`;
    if (theme) source.postMessage({ regardTheme: theme }, "*");
  });
})();
"""


def html(packed: Packed) -> str:
    """The complete page, in ASCII."""
    data = _BLOCK.format("data", _base64(packed.data))
    vectors = _BLOCK.format("vectors", _base64(packed.vectors)) if packed.vectors else ""
    return _page(text_html(packed.title), data, vectors)


def shell(look: str) -> str:
    """The page without data, which asks the server that it came from for the data of a look, and for nothing else."""
    return _page("regard", look=_LOOK.format(text_html(look)))


def served_policy(page: str) -> str:
    """The policy of a page for a header of HTTP, where it may also forbid frames.

    Raises:
        ValueError: The page was not written by regard, whose policy names every script by its hash.
    """
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page[:2000])
    if policy is None or not re.fullmatch(_POLICY_FORM, policy.group(1)):
        raise ValueError("the file must be a page that regard wrote; its policy names other scripts.")
    return policy.group(1) + "; frame-ancestors 'none'"


def _page(title: str, data: str = "", vectors: str = "", look: str = "") -> str:
    script, style = _script(), _style()
    policy = _POLICY.format(_hash(_UNPACK), _hash(script), _hash(style), "connect-src 'self'; " if look else "")
    return _PAGE.format(
        policy=policy,
        title=title,
        look=look,
        style=_base85(zlib.compress(style.encode(), 9)),
        script=_base85(zlib.compress(script.encode(), 9)),
        data=data,
        vectors=vectors,
        unpack=_UNPACK,
    )


def frame(page: str) -> str:
    """The page as a notebook shows it: in a frame that may run its own script, write to the clipboard and download."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" allow="clipboard-write" srcdoc="{escaping.escape(page)}" '
        f'style="width:100%;height:{HEIGHT}px;border:0;resize:vertical" title="attention, shown by regard"></iframe>'
        f"<script>{_FIT}</script>"
    )


def page_style(more: str = "") -> tuple[str, str]:
    """The style of a page with further rules, and its hash for a Content-Security-Policy."""
    style = _file("page.css") + more
    return style, _hash(style)


def text_html(text: str) -> str:
    """A short text as HTML in ASCII: no tag, no control character, no lone surrogate."""
    plain = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text[:300])
    return escaping.escape(plain).encode("ascii", "xmlcharrefreplace").decode()


@functools.cache
def _file(name: str) -> str:
    """A file of this folder, without indentation and without comments: those of lines, and those that end a line."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    lines = (re.sub(r" // [^\"'`]*$", "", line.strip()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"//|/\*.*\*/$", line))


@functools.cache
def _style() -> str:
    """The style of a page, without the spaces and lines around its signs."""
    return re.sub(r"(?<=[a-z-]): |(?<=[{};,])[ \n]| (?=[{}])", lambda m: m[0].strip(), _file("page.css"))


@functools.cache
def _script() -> str:
    """The modules as one: without imports and exports, since the names of all modules differ.

    Lines that end with a comma are joined with the next one: fewer kinds of endings pack better.
    """
    script = "\n".join(_file(f"js/{name}.js") for name in _MODULES)
    script = re.sub(r"^import \{[^}]*\} from [^\n]*\n|^export ", "", script, flags=re.M)
    return _without_spaces(script.replace(",\n", ", "))


#: Parts of a script that are no code, or may end it: texts in quotes, patterns, and what begins or ends a template.
_NO_CODE = re.compile(
    r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"|(?:(?<=[(,=:!&|?{;\[])|(?<=return))\ ?/(?![/*])(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n\[])+/|[`{}]"
)
#: The text of a template, up to its end or to the code inside it.
_TEMPLATE = re.compile(r"(?:\\.|\$(?!\{)|[^`\\$])*(`|\$\{)")
_BLANK = re.compile(" *")
_SPACES = re.compile(
    r" ?(=>|[=!]==|[<>]=|&&|\|\||\?\?=?|[=<>*?:,;]|(?<= )[-+/%](?= [^-+/*])) ?"
    r"|(?<=;)\n|(?<=\bif) (?=\()|(?<=\bfor) (?=\()"
)


def _without_spaces(script: str) -> str:
    """The script without the spaces around its signs, and without lines that a sign ends anyway.

    Those in texts, patterns and templates stay.
    """
    parts, at = [], 0
    depths: list[int] = []  # of braces, in the code inside of every template around
    while match := _NO_CODE.search(script, at):
        sign = match[0]
        code = _SPACES.sub(r"\1", script[at : match.start()])
        parts.append(code.rstrip(" \n") if sign == "}" else code.rstrip(" ") if sign == "{" else code)
        at = match.end()
        if sign == "{" and depths:
            depths[-1] += 1
        elif sign == "}" and depths and depths[-1]:
            depths[-1] -= 1
        elif sign == "`" or (sign == "}" and depths):
            if sign == "}":
                depths.pop()
            text = _TEMPLATE.match(script, at)
            assert text, "a template ends"
            sign, at = sign + text[0], text.end()
            depths += [0] if text[1] == "${" else []
        parts.append(sign)
        if sign.endswith(("{", "}")):  # code goes on; the text of a template ends with its last sign
            at = _BLANK.match(script, at).end()  # type: ignore[union-attr]
    return "".join([*parts, _SPACES.sub(r"\1", script[at:])])


def _hash(text: str) -> str:
    return "sha256-" + _base64(hashlib.sha256(text.encode()).digest())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _base85(data: bytes) -> str:
    return base64.b85encode(data).decode().translate(_OF_RFC_1924)
