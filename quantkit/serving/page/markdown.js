"use strict";
// Blocks → elements. While a text grows, its blocks are compared with those that are shown: only what is new
// is made, such as the last row of a table, and what is shown is the same however the text came.

const PAUSE = 3;  // times as long as it took to show a text, until more of it is shown

const MAKERS = {
  heading: (block) => element("h" + Math.min(6, block.shell + 2), "", leaf(block)),
  paragraph: (block) => element("p", "", leaf(block)),
  span: (block) => element("span", "", leaf(block)),
  cell: (block) => element(block.tag, block.side, leaf(block)),
  text: (block) => element("p", "math", block.source),
  rule: () => element("hr"),
  quote: () => element("blockquote"),
  item: () => element("li"),
  row: () => element("tr"),
  code: makeCode,
  list: makeList,
  table: makeTable,
};

// The nodes of text that isn't divided.
function leaf(block) { return block.parts ? [] : inline(block.source); }

function makeCode({ shell: language, code, open }) {
  const text = element("code", "", open ? code : highlight(code, language));
  const copy = copier(() => text.textContent), label = element("span", "", language || "code");
  const pre = element("pre", "", text);
  pre.tabIndex = 0;
  return element("div", "code", element("div", "code-head", label, copy), pre);
}

function makeList({ shell: number }) {
  const list = element(number === null ? "ul" : "ol");
  if (number !== null && number !== 1) list.start = number;
  return list;
}

function makeTable({ head }) {
  const { node } = new BlockView(head);
  for (const cell of node.children) cell.scope = "col";
  const box = element("div", "table-box", element("table", "", element("thead", "", node), element("tbody")));
  box.tabIndex = 0;
  return box;
}

// A block that is shown.
class BlockView {
  constructor(block) {
    this.node = MAKERS[block.type](block);
    this.inside = this.node.querySelector("tbody") ?? this.node;  // where its parts are
    this.parts = [];
    this.show(block);
  }

  show(block) {
    this.block = block;
    if (block.type === "list") this.node.toggleAttribute("data-loose", block.loose);
    showBlocks(this.inside, this.parts, block.parts ?? []);
  }

  // Shows what the block has become. Returns whether it could: otherwise another element is needed.
  update(block) {
    const before = this.block;
    if (block.type !== before.type || block.shell !== before.shell) return false;
    if (block.source === before.source && block.open === before.open) return true;
    if (block.type === "code") return this.lengthen(block);
    if (!block.parts || !before.parts) return false;
    this.show(block);
    return true;
  }

  // More of an open code block, which is coloured when it or the text ends.
  lengthen(block) {
    const { code, open } = this.block;
    if (!open || !block.open || !block.code.startsWith(code)) return false;
    this.node.querySelector("code").append(block.code.slice(code.length));
    this.block = block;
    return true;
  }
}

// Makes the last elements of `root`, those of `views`, show these blocks.
function showBlocks(root, views, blocks) {
  blocks.forEach((block, index) => {
    const view = views[index];
    if (view?.update(block)) return;
    views[index] = new BlockView(block);
    if (view) view.node.replaceWith(views[index].node);
    else root.append(views[index].node);
  });
  for (const view of views.splice(blocks.length)) view.node.remove();
}

// Indents a line in spaces; code keeps its tabs. Returns it, and the mark of the fence that it leaves open.
function untabbed(line, fence) {
  const mark = fenceOf(line.trimStart())?.mark ?? "";
  const open = !fence ? mark : mark.startsWith(fence) ? "" : fence;
  return [open ? line : line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")), open];
}

class MarkdownView {
  constructor(root) {
    this.root = root;
    this.text = "";    // from the last line on that was incomplete
    this.lines = [];   // complete ones, from the first block on that may still change
    this.fence = "";   // that is open behind them
    this.views = [];   // of blocks that may still change
    this.frame = this.due = 0;
  }

  // Shows more text with the next frame, or later where the last one took long.
  push(text, shown = () => {}) {
    this.text += text;
    const draw = () => {
      const begun = performance.now();
      this.frame = begun < this.due ? requestAnimationFrame(draw) : 0;
      if (this.frame) return;
      this.render(false);
      shown();
      this.due = performance.now() + PAUSE * (performance.now() - begun);
    };
    this.frame ||= requestAnimationFrame(draw);
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.render(true);
  }

  render(complete) {
    const fresh = this.text.split("\n");
    this.text = fresh.pop();
    for (const line of fresh) {
      const [indented, fence] = untabbed(line, this.fence);
      this.lines.push(indented);
      this.fence = fence;
    }
    const lines = [...this.lines, untabbed(this.text, this.fence)[0]], blocks = parseBlocks(lines);
    if (complete && blocks.at(-1)?.open) blocks.at(-1).open = false;
    showBlocks(this.root, this.views, blocks);
    // the last line may become another kind of block and make the one before it the head of a table, so that
    // only blocks before these two are known to have ended
    const sure = blocks.findLastIndex((block) => block.line < lines.length - 2);
    const finished = complete ? blocks.length : sure;
    if (finished <= 0) return;
    this.views.splice(0, finished);
    this.lines.splice(0, finished < blocks.length ? blocks[finished].line : lines.length);
  }
}
