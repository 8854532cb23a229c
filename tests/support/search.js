// Asks the search of a built site, as its pages do: node search.js SITE QUERY ...; a line of JSON with the hits of each.
"use strict"
const fs = require("fs")
const path = require("path")
const vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const workers = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))

let receive
let answered
const self = {
  console,
  addEventListener: (_, listener) => { receive = listener },
  postMessage: (message) => answered(message),
}
self.self = self
vm.runInNewContext(fs.readFileSync(path.join(workers, worker), "utf8"), self)

const ask = (type, data) => new Promise((resolve) => { answered = resolve; receive({ data: { type, data, ...data } }) })

async function main() {
  await ask(0, { config: index.config, docs: index.docs, options: {} })
  for (const query of queries) {
    const pages = (await ask(2, query)).data.items // the hits of a page are together, the best page is first
    console.log(JSON.stringify(pages.map((hits) => hits.sort((one, other) => other.score - one.score)[0].location)))
  }
}

main()
