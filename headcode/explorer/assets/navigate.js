// Links between states change the address without loading the page anew, and without jumping to its top.
// Without this script they still work, as ordinary links.
(function () {
  "use strict";
  document.addEventListener("click", function (event) {
    var target = event.target instanceof Element ? event.target : null;
    document.querySelectorAll("details.menu[open]").forEach(function (menu) {
      if (!target || !menu.contains(target)) menu.open = false;
    });
    var link = target && target.closest("a[href^='?']");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    var menu = link.closest("details.menu");
    if (menu) menu.open = false;
    window.history.pushState({}, "", link.getAttribute("href"));
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
  });
  document.addEventListener("keydown", function (event) {
    if (event.key !== "Escape") return;
    document.querySelectorAll("details.menu[open]").forEach(function (menu) { menu.open = false; });
  });
})();
