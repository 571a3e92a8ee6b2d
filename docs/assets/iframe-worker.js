// The search runs in a worker, which browsers refuse to pages opened from a file: there, a frame
// takes its place, so that the manual can be searched without a server.
if (location.protocol === "file:") {
  const load = (inside, url) =>
    new Promise((done, failed) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = done
      script.onerror = failed
      inside.document.head.append(script)
    })
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => load(inside, next)), Promise.resolve())
      this.ready = load(inside, url)
    }
    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
