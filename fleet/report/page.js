"use strict";
// Zoom: a picture becomes wider than its place, which then scrolls. What one looks at stays in the middle.
const zooms = {};
function widen(box, by) {
  const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
  zooms[box.id] = Math.min(64, Math.max(1, (zooms[box.id] || 1) * by));
  box.querySelector(".plot").style.setProperty("--zoom", zooms[box.id]);
  box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
}
function prepare() {
  for (const bar of document.querySelectorAll(".zoom")) {
    bar.hidden = false;
    for (const button of bar.querySelectorAll("button"))
      button.onclick = () => widen(document.getElementById(bar.dataset.for), Number(button.dataset.by));
  }
}
prepare();
// LivePage: the whole page takes the place of what was there; open details, zoom, scrolling and focus stay as they are. They are
// kept while there is trouble and nothing to be opened or scrolled.
const opened = new Set(), scrolled = new Map();
let down = 0;
const boxes = () => document.querySelectorAll(".scroll, pre, nav ul");
function place(each) {
  const near = each.closest("[id]");
  return near && [near.id, each.tagName, [...near.querySelectorAll(each.tagName)].indexOf(each)].join(" ");
}
function at(place) {
  const [id, tag, number] = place.split(" "), near = document.getElementById(id);
  return near && (number < 0 ? near : near.querySelectorAll(tag)[number]);
}
function remember() {
  for (const each of document.querySelectorAll("details")) each.open ? opened.add(each.id) : opened.delete(each.id);
  for (const each of boxes()) scrolled.set(place(each), [each.scrollLeft, each.scrollTop]);
  if (document.querySelector("nav")) down = window.scrollY;
}
function restore() {
  for (const each of document.querySelectorAll("details")) each.open = opened.has(each.id);
  prepare();
  for (const id of Object.keys(zooms)) {
    const box = document.getElementById(id);
    if (box) box.querySelector(".plot").style.setProperty("--zoom", zooms[id]);
  }
  for (const each of boxes()) [each.scrollLeft, each.scrollTop] = scrolled.get(place(each)) || [0, 0];
  if (document.querySelector("nav")) window.scrollTo({ top: down, behavior: "instant" });
}
function renew(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html"), parts = ":scope > :not(script)";
  if (!fresh.querySelector("header")) throw new Error("this is no report");
  remember();
  const focused = document.activeElement !== document.body && place(document.activeElement);
  for (const old of document.body.querySelectorAll(parts)) old.remove();
  document.body.prepend(...fresh.body.querySelectorAll(parts));
  document.title = fresh.title;
  restore();
  const again = focused && at(focused);
  if (again) again.focus({ preventScroll: true });
}
if ("live" in document.body.dataset) {
  let tag = "";
  const again = async () => {
    try {
      const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) { renew(await answer.text()); tag = answer.headers.get("ETag") || ""; }
      document.body.classList.remove("away");
    } catch { document.body.classList.add("away"); }
    setTimeout(again, 3000);
  };
  setTimeout(again, 3000);
}
