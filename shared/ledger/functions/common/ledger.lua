-- The ledger as a whole: its state and its counters, which each call reads first. `writes.lua` writes them.
--
-- `records.lua` loads and caches the records that a call reads; `writes.lua` writes all changes at its end, so that a
-- refused call writes nothing.
--
--   ledger  hash  format, generation, ready, version (the last one), capacity, feed_entry (ID of the last one),
--     fence_floor, node_number (the last one), rebuild_lock_until, total_cores, total_mib,
--     claims and quotas (their number; quotas: absent while they are not known),
--     records (how many the keys in RECORDS have together: a ledger with fewer has lost some),
--     evicts (the server's policy, if it may evict keys: nothing is served then),
--     inventory_grew (capacity number at which the inventory last became better),
--     reasons_changed (the one at which the reasons of verdicts last changed: nodes, devices or cordons),
--     offered_up_to (number up to which freed capacity has been offered), offer_round (how often what was freed after
--     that was offered), offer_round_for (the highest score of `freed-nodes` then),
--     repels_version (the highest that was put into `repelling`, absent before the first), repels_floor (the highest
--     of those that the watcher has reported since)
--   nodes, devices  hashes  name, uuid -> NodeRecord, DeviceRecord (`shared/ledger/records.py`)
--   leases  hash  pod -> see L_*
--   lease-nodes  zset  pod -> number of the node that its lease is on
--   gang-leases  zset  gang|pod of every live lease of a gang, all of score 0
--   facts:NODE  hash  facts, rules, excluded_devices, devices, uuids, served, reported_at, saved_at (of the last
--     changed report, by this server), by_agent
--   wide-terms  set  nodes whose pods may keep pods off other nodes, by required anti-affinity
--   node-revision:NODE  string  revisions of the node and its pods as last saved or removed, for two minutes
--   cordons  hash  node -> why no pod may be bound to it now
--   vanished  set  pods that are gone while they have leases: their containers may still run
--   silent  zset  those of them about which their nodes' agents do not reply -> instant of the first request without
--     a reply
--   expiring  zset  ExpiringRecord -> instant at which their reservations expire
--   freed-nodes  zset  node -> capacity number at which something on it was last freed
--   waiting  hash  pod -> WaitingRecord
--   waiting-groups  hash  group of equal smallest needs -> number of pods that wait in it
--   gang-waiting  zset  gang|order|pod of every waiting pod of a gang, all of score 0
--   changed-gangs  set  gangs whose pods' verdicts must be decided again
--   verdicts  zset  order|pod -> capacity number at which it was last decided or offered
--   offers  zset  order|pod -> instant of an offer that was not decided yet
--   unreadable  hash  (not changed by a rebuild) kind and key of a record that could not be read -> instant
--   feed  stream  absolute totals, one entry per call, with the IDs that Redis gives: p ID of the entry before,
--     e generation, v version, c capacity number, w cause, n and d changed nodes and devices, fNODE gNODE sNODE rNODE
--     facts, devices, served resources and `repelling` terms of a node, xNODE a node that was removed
--   others: see fair.lua, quota.lua, claims.lua, gone_pods.lua, repelling.lua, selected.lua,
--     tenures.lua and resize.lua
--
-- Nodes, devices and leases are many and change often. They are fields of a few hashes: one call reads or
-- writes all that a function needs.
local server = require('server')
local call, pcall = redis.call, redis.pcall

-- The number of the format of all that is stored under the prefix, but for `ledger`, which every version
-- must be able to read. A ledger of an older format counts as empty; a newer one is not touched.
local FORMAT = 8
-- The highest version or fence that a caller may know from elsewhere. Both begin at the present in
-- milliseconds, by a clock that may have been wrong by decades; the ledger counts on from any of them.
local MAX_AHEAD_MS = 2 ^ 42

local M = {FORMAT = FORMAT}

local record_count -- when the call began

-- How many records there are, but for those of single nodes, namespaces and groups. A key of another type has none.
local RECORDS = {
  HLEN = {'leases', 'devices', 'nodes', 'waiting', 'waiting-groups', 'claims', 'cordons', 'unsynced', 'starts',
    'entitlements', 'node-sizes'},
  ZCARD = {'lease-nodes', 'claim-nodes', 'gang-leases', 'expiring', 'freed-nodes', 'gang-waiting', 'verdicts'},
}
local function count_records()
  local prefix, sum = server.prefix, 0
  local counts = {pcall('HLEN', server.beside .. '-quotas'), pcall('SCARD', prefix .. 'vanished'),
    pcall('SCARD', prefix .. 'wide-terms')}
  for _, key in ipairs(RECORDS.HLEN) do counts[#counts + 1] = pcall('HLEN', prefix .. key) end
  for _, key in ipairs(RECORDS.ZCARD) do counts[#counts + 1] = pcall('ZCARD', prefix .. key) end
  for _, number in ipairs(counts) do sum = sum + (tonumber(number) or 0) end
  return sum
end

-- Read the ledger; or return why it cannot be used, as an error reply. `may_write`: the function may write.
function M.open(may_write)
  local required = server.required_state
  local is_strict = required == 'ready' or required == 'open'
  local stored = pcall('HMGET', server.prefix .. 'ledger', 'ready', 'generation', 'version', 'capacity',
    'feed_entry', 'fence_floor', 'node_number', 'claims', 'format', 'records', 'evicts', 'repels_version', 'quotas')
  if stored.err and not string.find(stored.err, '^WRONGTYPE') then return stored end
  if stored.err then stored = {} end -- a key of another type counts as empty
  local was_ready, generation, format = stored[1] == '1', stored[2], tonumber(stored[9] or 0)
  if generation and format ~= FORMAT then
    local formats = string.format('%.0f %.0f', format, FORMAT)
    if format > FORMAT then return redis.error_reply('FORMAT ' .. formats) end
    if is_strict then return redis.error_reply('NOTREADY ' .. formats) end
    was_ready, generation = false, false
  end
  if stored[11] and required ~= 'check' then return redis.error_reply('EVICTS ' .. stored[11]) end
  if is_strict and (not generation or required == 'ready' and not was_ready) then
    return redis.error_reply('NOTREADY')
  end
  record_count = count_records()
  local has_lost_records = was_ready and record_count < tonumber(stored[10] or 0)
  if has_lost_records then
    pcall('HSET', server.prefix .. 'ledger', 'ready', 0) -- the caller may only have the right to read
    if is_strict then return redis.error_reply('LOSTRECORDS ' .. record_count .. ' ' .. stored[10]) end
  end
  M.is_ready = was_ready and not has_lost_records
  M.generation = generation or ''
  M.version = tonumber(stored[3] or 0)
  M.capacity = tonumber(stored[4] or 0)
  if M.is_ready and server.known_version > M.version then
    if may_write then
      call('HSET', server.prefix .. 'ledger', 'ready', 0, 'version', string.format('%.0f', server.known_version))
    end
    return redis.error_reply('LOSTWRITES')
  end
  M.first_version = M.version
  M.first_capacity = M.capacity
  M.feed_entry = stored[5] or '0-0'
  M.fence_floor = tonumber(stored[6] or 0)
  M.node_number = tonumber(stored[7] or 0)
  M.claim_count = tonumber(stored[8] or 0)
  M.evicts = stored[11]
  M.repels_version = stored[12] -- false before the first
  M.has_quotas = tonumber(stored[13] or 0) > 0
end

function M.next_version()
  local version = M.version + 1
  M.version = version
  return version
end

function M.highest_number(time) return time[1] * 1000 + MAX_AHEAD_MS end

-- After a function that may have written: save how many records there are now.
function M.close()
  local count = count_records()
  if count ~= record_count and call('EXISTS', server.prefix .. 'ledger') == 1 then
    call('HSET', server.prefix .. 'ledger', 'records', count)
  end
end

return M
