// Pages that are opened from a disk may not start workers, and the search is one. Here a worker is a
// hidden frame of the same page that runs its script; messages are handed over as they are.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      var worker = this;
      var frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      var inside = frame.contentWindow;
      inside.postMessage = function (data) {
        var event = new MessageEvent("message", { data: data });
        worker.dispatchEvent(event);
        if (worker.onmessage) worker.onmessage(event);
      };
      inside.importScripts = function () {
        return Promise.all(
          Array.from(arguments, function (source) {
            return new Promise(function (done, failed) {
              var script = inside.document.createElement("script");
              script.src = source;
              script.onload = done;
              script.onerror = failed;
              inside.document.body.appendChild(script);
            });
          })
        );
      };
      this.ready = inside.importScripts(url);
      this.inside = inside;
    }
    postMessage(data) {
      var inside = this.inside;
      this.ready.then(function () {
        var event = new inside.MessageEvent("message", { data: data });
        inside.dispatchEvent(event);
        if (inside.onmessage) inside.onmessage(event);
      });
    }
    terminate() {}
  };
}
