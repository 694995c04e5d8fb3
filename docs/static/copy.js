// Give each block of code a button that copies it. Blocks of output (`text`) have none.
document.addEventListener("DOMContentLoaded", () => {
    if (!navigator.clipboard) return; // on pages over plain HTTP
    for (const block of document.querySelectorAll("div.highlight")) {
        if (block.closest(".highlight-text")) continue;
        const button = document.createElement("button");
        button.type = "button";
        button.className = "copy";
        button.textContent = "Copy";
        button.addEventListener("click", async () => {
            await navigator.clipboard.writeText(block.querySelector("pre").textContent);
            button.textContent = "Copied";
            setTimeout(() => { button.textContent = "Copy"; }, 2000);
        });
        block.append(button);
    }
});
