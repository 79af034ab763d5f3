"""The page as one HTML file with its script, its style and its data inside; it requests nothing from anywhere.

A Content-Security-Policy allows this script and this style, by their hashes, and nothing else: no request, no other
script, whatever the data says. Images come from the page itself alone (blob:): it draws one to save it as PNG.
Script, style and data are deflated, since a notebook stores a page for every view; a few plain lines unpack them, and
the browser runs only what has the right hash. The title is the only text outside of the data. In a notebook the page is
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

__all__ = ["frame", "html", "page_style", "text_html"]

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
</head>
<body>
<div id="regard"></div>
<noscript>This page draws its pictures with a script, which is inside the file. Allow scripts to see them.</noscript>
<script type="application/octet-stream" id="regard-style">{style}</script>
<script type="application/octet-stream" id="regard-script">{script}</script>
<script type="application/octet-stream" id="regard-data">{data}</script>
{vectors}<script type="module">{unpack}</script>
</body>
</html>
"""

#: Queries and keys of long inputs: megabytes that the first picture does not wait for.
_VECTORS = '<script type="application/octet-stream" id="regard-vectors">{}</script>\n'

#: Runs first: unpacks the style and the script.
_UNPACK = """
const text = (id) => {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
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
"""

#: The modules of the script, in the order in which they become one.
_MODULES = (
    "data", "numbers", "elements", "stored", "exact", "book", "window", "page", "controls",
    "sentence", "lines", "spotlight", "walk", "play", "square", "atlas", "overview",
    "tiles", "rulers", "map", "long", "compare", "patterns", "training", "snapshot", "share", "scenes", "story",
    "address", "views",
)  # fmt: skip

#: The height of the page in a notebook until the page says how tall it is, in pixels; the frame can be resized.
HEIGHT = 760

#: Beside the frame in a notebook: gives it the height of its page, and tells the page whether the notebook is dark. A
#: frame without an origin can neither be measured from outside nor look at the notebook.
_FIT = """
(() => {
  const frame = document.currentScript.previousElementSibling;
  const { body } = document, light = body.dataset.jpThemeLight, name = body.className;
  const theme = light ? (light === "true" ? "light" : "dark") : /vscode-dark|dark-theme/.test(name) ? "dark"
    : /vscode-light|light-theme/.test(name) ? "light" : null;
  addEventListener("message", ({ source, data }) => {
    if (source !== frame.contentWindow || !(data?.regardHeight > 0)) return;
    frame.style.height = `${Math.min(data.regardHeight, 2400)}px`;
    if (theme) source.postMessage({ regardTheme: theme }, "*");
  });
})();
"""


def html(packed: Packed) -> str:
    """The complete page, in ASCII."""
    script, style = _script(), _file("page.css")
    policy = (
        f"default-src 'none'; script-src '{_hash(_UNPACK)}' '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src blob:; base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy,
        title=text_html(packed.title),
        style=_base64(zlib.compress(style.encode(), 9)),
        script=_base64(zlib.compress(script.encode(), 9)),
        data=_base64(packed.data),
        vectors=_VECTORS.format(_base64(packed.vectors)) if packed.vectors else "",
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
    """A file of this folder, without indentation and without comments that have a line to themselves."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"//|/\*.*\*/$", line))


@functools.cache
def _script() -> str:
    """The modules as one: without imports and exports, since the names of all modules differ."""
    script = "\n".join(_file(f"js/{name}.js") for name in _MODULES)
    return re.sub(r"^import \{[^}]*\} from [^\n]*\n|^export ", "", script, flags=re.M)


def _hash(text: str) -> str:
    return "sha256-" + _base64(hashlib.sha256(text.encode()).digest())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
