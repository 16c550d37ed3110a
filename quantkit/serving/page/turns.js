"use strict";
// One turn of a conversation as elements, and what can be done with it.

class UserTurn {
  constructor(text, edit) {
    this.node = element("div", "turn user");
    this.show(text, edit);
  }

  show(text, edit) {
    const actions = element("div", "turn-actions", copier(() => text, iconButton("Copy", "", () => {})),
      iconButton("Edit", "edit", () => this.change(text, edit)));
    this.node.replaceChildren(element("div", "text", text), actions);
  }

  // The text as a field. Sending it replaces what came after it.
  change(text, edit) {
    const input = element("textarea", "", text);
    input.setAttribute("aria-label", "Edited message");
    input.rows = Math.min(12, text.split("\n").length + 1);
    const cancel = () => {
      this.show(text, edit);
      this.node.querySelector(".edit").focus();
    };
    // the field stays until its text is sent
    const send = () => { if (input.value.trim()) edit(input.value); };
    input.addEventListener("keydown", (event) => {
      if (composing(event)) return;
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
    });
    this.node.replaceChildren(input, element("div", "turn-actions editing",
      element("span", "note", "Later turns are replaced."), button("Cancel", "small", cancel),
      button("Send", "small primary", send)));
    input.focus();
  }
}

class AssistantTurn {
  // `actions`: `regenerate` and `resume`.
  constructor(actions) {
    this.actions = actions;
    this.body = element("div", "markdown");
    this.markdown = new MarkdownView(this.body);
    this.footer = element("div", "turn-actions");
    this.speed = element("span", "speed");
    this.footer.append(this.speed);
    this.node = element("div", "turn assistant", this.body, this.footer);
    this.calls = null;
    this.thoughts = null;
  }

  // A stored answer.
  static of(turn, actions) {
    const view = new AssistantTurn(actions);
    if (turn.reasoning) view.think(turn.reasoning);
    view.markdown.push(turn.content);
    view.finish(turn);
    return view;
  }

  set writing(on) { this.node.classList.toggle("writing", on); }

  write(text, shown) { this.markdown.push(text, shown); }

  think(text, shown) {
    if (!this.thoughts) {
      const root = element("div", "thoughts markdown");
      const details = element("details", "", element("summary", "", "Reasoning"), root);
      details.open = this.node.classList.contains("writing");
      this.thoughts = new MarkdownView(root);
      this.node.insertBefore(details, this.body);
    }
    this.thoughts.push(text, shown);
  }

  // Calls are never made from here, and are shown as they were written.
  showCalls(calls) {
    if (!this.calls) {
      this.calls = element("pre", "calls");
      this.calls.tabIndex = 0;
      this.node.insertBefore(this.calls, this.footer);
    }
    this.calls.textContent = calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
  }

  finish(turn) {
    this.writing = false;
    this.thoughts?.end();
    this.markdown.end();
    const details = this.node.querySelector("details");
    if (details && turn.content) details.open = false;
    if (turn.calls?.length) this.showCalls(turn.calls);
    if (turn.ended && !turn.error && !this.body.hasChildNodes() && !turn.reasoning && !turn.calls?.length) {
      this.body.append(element("p", "note", "empty answer"));
    }
    if (turn.error) this.node.insertBefore(element("div", "error", turn.error), this.footer);
    this.speed.textContent = turn.figures;
    if (turn.content) this.footer.append(copier(() => turn.content, iconButton("Copy", "", () => {})));
    this.footer.append(iconButton("Regenerate", "last-only", this.actions.regenerate));
    if (turn.content && ["length", "stopped", "error"].includes(turn.ended)) {
      this.footer.append(iconButton("Continue", "last-only", this.actions.resume));
    }
  }
}
