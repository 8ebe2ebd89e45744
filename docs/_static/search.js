// Excerpts of search results show the article. The theme's <main>, which Sphinx would
// read, also holds the buttons above it and the list of contents.
if (typeof Search !== "undefined") {
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
