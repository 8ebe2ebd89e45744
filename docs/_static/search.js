// Sphinx's search, in three ways closer to what people type and expect.
if (typeof Search !== "undefined") {
  const PAGE = 0, TITLE = 1, SCORE = 4;

  // If no page has all words, pages that have most of them are shown. A page is listed
  // once, and tables of measurements come last.
  const search = Search._performSearch;
  Search._performSearch = (query, terms, excluded, highlighted, objects) => {
    let found = search(query, terms, excluded, highlighted, objects);
    const hasAll = found.length > 0;
    if (!hasAll && terms.size > 1) {
      found = [...terms].flatMap((term) =>
        search(term, new Set([term]), excluded, highlighted, new Set()),
      );
    }
    const pages = new Map();
    for (const result of found) {
      const key = `${result[PAGE]} ${result[TITLE]}`;
      const other = pages.get(key)?.[SCORE] ?? 0;
      const own = result[PAGE].startsWith("results/") ? result[SCORE] / 10 : result[SCORE];
      if (hasAll && own < other) continue;
      pages.set(key, result.with(SCORE, hasAll ? own : own + other));
    }
    return [...pages.values()].sort((a, b) => a[SCORE] - b[SCORE]); // The best is last.
  };

  // Excerpts show the article. The theme's <main>, which Sphinx would read, also holds
  // the buttons above it and the list of contents.
  const toText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const article = page.querySelector("article.bd-article");
    if (article === null) return toText(html, anchor);
    page.querySelectorAll('[role="main"]').forEach((main) => main.removeAttribute("role"));
    article.setAttribute("role", "main");
    return toText(page.documentElement.outerHTML, anchor);
  };
}
