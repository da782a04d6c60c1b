-- The kinds of records that are fields of a hash, so that one of them can be damaged alone.
local layouts = require('layouts')
local quota = require('quota')
local records = require('records')
local server = require('server')
local values = require('values')
local parse_json = cjson.decode

-- What follows the ledger's prefix, and what of the `beside` keys, which a rebuild does not change.
local LAYOUTS = {
  ['waiting'] = layouts.WAITING,
  ['claims'] = layouts.CLAIM,
  ['repelling'] = layouts.REPELLING,
  ['entitlements'] = layouts.ENTITLEMENT,
  ['node-sizes'] = layouts.SIZE,
  ['unsynced'] = layouts.UNSYNCED,
  ['quota-charges'] = layouts.CHARGES,
}
local LAYOUTS_BESIDE = {
  ['quotas'] = layouts.QUOTA,
  ['preemption:budgets'] = layouts.BUDGET,
  ['preemption:preemptions'] = layouts.PREEMPTION,
}

local M = {}

function M.key(kind) return LAYOUTS_BESIDE[kind] and server.beside .. '-' .. kind or server.prefix .. kind end

function M.is_readable(kind, value)
  if kind == 'starts' then return values.readable(value, parse_json).opened_at ~= nil end
  if kind == 'quota-used' then return quota.used_in(value) and true or false end
  if kind == 'leases' or kind == 'devices' or kind == 'nodes' then return records.is_readable(kind, value) end
  return values.record(value, LAYOUTS[kind] or LAYOUTS_BESIDE[kind]) ~= nil
end

return M
