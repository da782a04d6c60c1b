-- Lists, sets and packed values.
local decode = cmsgpack.unpack
local M = {}

function M.append(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

function M.set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

-- For each pair of a flat list, its two values.
function M.each_pair(flat)
  local i = -1
  return function()
    i = i + 2
    return flat[i], flat[i + 1]
  end
end

-- The record that was packed with this layout, or nil if it is missing or cannot be decoded.
function M.record(value, layout)
  if not value then return nil end
  local is_read, record, more = pcall(decode, value)
  if is_read and more == nil and M.has_types(record, layout.TYPES) then return record end
end

-- Whether what was decoded is an array with values of these types.
function M.has_types(record, types)
  if type(record) ~= 'table' or #record ~= #types then return false end
  for i = 1, #types do
    if type(record[i]) ~= types[i] then return false end
  end
  return true
end

-- What was packed, or as JSON; {} if it is missing or cannot be read.
function M.readable(value, parse)
  if not value then return {} end
  local is_read, content = pcall(parse or decode, value)
  return is_read and type(content) == 'table' and content or {}
end

return M
