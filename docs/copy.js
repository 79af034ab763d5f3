// The copy button of an example takes the code alone: no prompts, and nothing that is printed.
for (const code of document.querySelectorAll(".highlight code")) {
  const lines = code.innerText.split("\n");
  if (!lines[0].startsWith(">>> ")) continue;
  const typed = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  code.dataset.copy = typed.map((line) => line.slice(4)).join("\n");
}
