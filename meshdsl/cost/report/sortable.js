for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells), body = table.tBodies[0];
  const key = (row, i) => row.cells[i].dataset.sort ?? row.cells[i].textContent;
  const order = (a, b) => isNaN(a) || isNaN(b) ? String(a).localeCompare(String(b)) : a - b;
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(body.rows).sort((a, b) => (down ? -1 : 1) * order(key(a, i), key(b, i)));
      body.append(...rows);
    });
  });
}
