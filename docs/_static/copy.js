// A button on each listing copies its code: without prompts and output, so that it can be pasted.
"use strict";

// In the plain Python prompt an empty line ends a block, so one follows each example of several lines.
function pasteable(text) {
  const lines = text.split("\n");
  if (lines.some((line) => line.startsWith(">>> "))) {
    const code = [];
    lines.forEach((line, i) => {
      if (/^(>>>|\.\.\.)( |$)/.test(line)) code.push(line.slice(4));
      const ends = !/^\.\.\.( |$)/.test(lines[i + 1] ?? "");
      if (/^\.\.\.( |$)/.test(line) && ends) code.push("");
    });
    return code.join("\n") + "\n";
  }
  if (lines.some((line) => line.startsWith("$ "))) {
    const isTyped = (line, i) => line.startsWith("$ ") || (i > 0 && lines[i - 1].endsWith("\\"));
    return lines.filter(isTyped).map((line) => line.replace(/^\$ /, "")).join("\n") + "\n";
  }
  return text;
}

function addButton(listing) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "copy";
  button.setAttribute("aria-label", "copy this listing without prompts");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(pasteable(listing.querySelector("pre").textContent));
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  listing.appendChild(button);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("div.highlight").forEach(addButton);
});
