// The widget of a notebook around the page: a frame without an origin, whose questions go to the kernel and back.

function render({ model, el }) {
  const frame = document.createElement("iframe"), { body } = document;
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  frame.setAttribute("allow", "clipboard-write");
  frame.setAttribute("title", "attention, shown by regard");
  frame.style.cssText = `width:100%;height:${model.get("height")}px;border:0;resize:vertical`;
  const light = body.dataset.jpThemeLight, name = body.className;
  const theme = light ? (light === "true" ? "light" : "dark") : /vscode-dark|dark/.test(name) ? "dark"
    : /vscode-light|light/.test(name) ? "light" : null;
  const hear = ({ source, data }) => {
    if (source !== frame.contentWindow) return;
    if (data?.regardHeight > 0) {
      frame.style.height = `${Math.min(data.regardHeight, 4000)}px`;
      if (theme) source.postMessage({ regardTheme: theme }, "*");
    }
    if (data?.regardAsk) model.send(data.regardAsk);
  };
  const answer = (message, buffers) => {
    const [bytes] = buffers ?? [];
    const buffer = bytes ? bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) : null;
    frame.contentWindow?.postMessage({ regardAnswer: { ...message, buffer } }, "*");
  };
  addEventListener("message", hear);
  model.on("msg:custom", answer);
  frame.srcdoc = model.get("page");
  el.append(frame);
  return () => { removeEventListener("message", hear); model.off("msg:custom", answer); };
}

export default { render };
