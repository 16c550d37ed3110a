"use strict";
// Blocks → elements, while the text grows: what is finished is made once, only the last block again.

const MAKERS = {
  heading: (block) => element("h" + Math.min(6, block.level + 2), "", ...inline(block.text)),
  paragraph: (block) => element("p", "", ...inline(block.text)),
  text: (block) => element("p", "math", block.text),
  rule: () => element("hr"),
  quote: (block) => element("blockquote", "", ...block.blocks.map(makeBlock)),
  code: (block) => makeCode(block).node,
  list: makeList,
  table: makeTable,
};

function makeBlock(block) { return MAKERS[block.type](block); }

function makeCode({ language, code, open }) {
  const text = element("code", "", ...(open ? [code] : highlight(code, language)));
  const copy = copier(() => text.textContent), label = element("span", "", language || "code");
  const pre = element("pre", "", text);
  pre.tabIndex = 0;
  return { node: element("div", "code", element("div", "code-head", label, copy), pre), text };
}

function makeList(block) {
  const list = element(block.ordered ? "ol" : "ul");
  if (block.ordered && block.number !== 1) list.start = block.number;
  for (const blocks of block.items) {
    list.append(element("li", "", ...blocks.flatMap((inner) => (
      inner.type === "paragraph" && !block.loose ? inline(ticked(inner.text)) : [makeBlock(inner)]))));
  }
  return list;
}

function ticked(text) {
  return text.replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ");
}

function makeTable(block) {
  const row = (texts, tag) => element("tr", "", ...texts.map((text, column) => {
    const cell = element(tag, block.sides[column], ...inline(text));
    if (tag === "th") cell.scope = "col";
    return cell;
  }));
  const table = element("table", "", element("thead", "", row(block.head, "th")),
    element("tbody", "", ...block.rows.map((texts) => row(texts, "td"))));
  const box = element("div", "table-box", table);
  box.tabIndex = 0;
  return box;
}

// Indents in spaces; code keeps its tabs.
function untabbed(lines) {
  let fence = "";
  return lines.map((line) => {
    const mark = fenceOf(line.trimStart())?.mark ?? "";
    if (mark && !fence) fence = mark;
    else if (fence && mark.startsWith(fence)) fence = "";
    return fence ? line : line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
  });
}

class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = "";
    this.start = 0;      // of the first block that may still change
    this.unfinished = [];
    this.fence = null;   // an open code block, which only gets longer
    this.frame = 0;
  }

  // Shows more text with the next frame.
  push(text, shown = () => {}) {
    this.text += text;
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.render(false); shown(); });
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.render(true);
  }

  render(complete) {
    const lines = untabbed(this.text.slice(this.start).split("\n"));
    const blocks = parseBlocks(lines);
    // the last line may become another kind of block, so that only blocks before it are known to have ended
    let finished = complete ? blocks.length : blocks.findLastIndex((block) => block.line < lines.length - 1);
    if (finished < 0) finished = 0;
    if (!complete && blocks.length === 1 && this.lengthen(blocks[0])) return;
    for (const node of this.unfinished) node.remove();
    this.fence = null;
    this.root.append(...blocks.slice(0, finished).map(makeBlock));
    this.unfinished = blocks.slice(finished).map((open) => {
      if (open.type !== "code" || !open.open) return makeBlock(open);
      this.fence = makeCode(open);
      return this.fence.node;
    });
    this.root.append(...this.unfinished);
    if (finished) this.start = this.offset(finished < blocks.length ? blocks[finished].line : lines.length);
  }

  // Whether a block is the open code block, with more text behind what is shown already.
  lengthen(block) {
    const shown = this.fence?.text.textContent;
    if (shown === undefined || !block.open || !block.code.startsWith(shown)) return false;
    this.fence.text.append(block.code.slice(shown.length));
    return true;
  }

  // Where a line begins, counted from the first that may still change.
  offset(line) {
    let at = this.start;
    for (; line > 0; line--) {
      const end = this.text.indexOf("\n", at);
      if (end < 0) return this.text.length;
      at = end + 1;
    }
    return at;
  }
}
