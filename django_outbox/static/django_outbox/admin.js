// A discard cannot be taken back, so the list asks before it sends one.
"use strict";
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.id !== "changelist-form") return;
  const verb = form.querySelector('select[name="action"]');
  if (!verb || verb.value !== "discard") return;
  if (!window.confirm("Discard the selected rows for good? What they still owe is never delivered.")) {
    event.preventDefault();
  }
});
