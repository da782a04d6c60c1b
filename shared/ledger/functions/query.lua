-- Query the ledger. Arguments: what, and a node or pods. `by_agent` says whether our agent sent the node's latest
-- device report; `gone` returns those of the pods that were reported as gone; `vanished` returns pods that are gone and
-- have leases, and since when their agents have not replied; `wide_terms` returns nodes whose pods may keep pods off
-- other nodes, by required anti-affinity.
local claims = require('claims')
local fair = require('fair')
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local repelling = require('repelling')
local server = require('server')
local call, encode = redis.call, cmsgpack.pack
local C = layouts.CLAIM
local queries = {}

function queries.unreadable() return call('HKEYS', server.prefix .. 'unreadable') end
function queries.by_agent(name) return server.number_at('facts:' .. name, 'by_agent') == 1 end
function queries.vanished()
  local pods = call('SMEMBERS', server.prefix .. 'vanished')
  return {pods, server.call_all('ZMSCORE', 'silent', pods)}
end

function queries.gone(pods)
  local found = {}
  for pod in pairs(gone_pods.among(pods)) do found[#found + 1] = pod end
  return found
end

function queries.wide_terms()
  local names = call('SMEMBERS', server.prefix .. 'wide-terms')
  for _, name in ipairs(repelling.wide_nodes()) do names[#names + 1] = name end
  return names
end

function queries.claimed()
  local rows = {}
  for _, claim in server.each_record(server.prefix .. 'claims', C) do
    for i, reserved in ipairs(claims.node_of(claim) and claim[C.RESERVED] or {}) do
      if reserved > 0 then
        rows[#rows + 1] = {claim[C.NODE], claim[C.RESOURCES][2 * i - 1], reserved}
      end
    end
  end
  return rows
end

local function gang_and_pod(set, pattern)
  local rows = {}
  for i, entry in ipairs(call('ZRANGE', server.prefix .. set, 0, -1)) do rows[i] = {string.match(entry, pattern)} end
  return rows
end

function queries.gangs() return gang_and_pod('gang-leases', '^([^|]*)|(.*)$') end
function queries.waiting_gangs() return gang_and_pod('gang-waiting', '^([^|]*)|[^|]*|(.*)$') end

-- Returns a FairShareRecord.
function queries.fair_share()
  local entitlements = {}
  for namespace, stored in server.each_record(server.prefix .. 'entitlements', layouts.ENTITLEMENT) do
    entitlements[#entitlements + 1] = {namespace, stored}
  end
  local total, used = fair.total_of(), {}
  for namespace, amounts in pairs(fair.used_by_all()) do used[#used + 1] = {namespace, unpack(amounts)} end
  return {total[1], total[2], used, entitlements}
end

return function(what, subject) return encode(queries[what](subject)) end
