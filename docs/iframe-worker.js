// Search of a site opened as files: browsers start no worker from a file, so an iframe runs its
// script. The theme's offline plugin fetches a shim from another host where none has this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      this.post = new Promise((resolve) => {
        frame.onload = () =>
          resolve((data) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
      });
      scope.document.open();
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      scope.document.write(`<body><script src="${url}"></script></body>`);
      scope.document.close();
    }

    postMessage(data) {
      this.post.then((post) => post(data));
    }
  };
}
