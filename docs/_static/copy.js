// Each picture opens alone, and a button on each listing copies its code: without prompts and output, so that it can be pasted.
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

// A picture that is narrower than drawn opens alone, where a phone can enlarge it.
function linkPicture(image) {
  const link = document.createElement("a");
  link.href = image.src;
  link.className = "picture";
  image.replaceWith(link);
  link.appendChild(image);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll('article p > img[src*=".svg"]').forEach(linkPicture);
  document.querySelectorAll("div.highlight").forEach(addButton);
});
