-- SPDX-License-Identifier: Apache-2.0
--
-- Wireshark dissector of SLMP (docs/slmp.md): UDP port 9330, either way.
--
--   tshark -X lua_script:docs/slmp.lua -i IFACE -Y slmp
--   wireshark -X lua_script:docs/slmp.lua FILE
--
-- Not as root: from Wireshark 4.4 on it runs no scripts then, and does not say so.
--
-- or copy it to the directory that Wireshark's About/Folders calls "Personal
-- Lua Plugins". Receivers on another port: Decode As, or -d udp.port==PORT,slmp.

local PORT = 9330
local HEADER, CUMULATIVE = 10, 14 -- bytes
local MAX_WORDS = 16              -- of a bitmap

local slmp = Proto("slmp", "sPIN Lightweight Messaging Protocol")

local EOM, SYN, ACK, CUM, WAIT, RESERVED = 0x8000, 0x4000, 0x2000, 0x1000, 0x0800, 0x07ff
local names = { { EOM, "EOM" }, { SYN, "SYN" }, { ACK, "ACK" }, { CUM, "Cumulative" }, { WAIT, "Wait" } }

local f = {
    flags      = ProtoField.uint16("slmp.flags", "Flags", base.HEX),
    eom        = ProtoField.bool("slmp.flags.eom", "EOM: the message ends with this segment", 16, nil, EOM),
    syn        = ProtoField.bool("slmp.flags.syn", "SYN: to be acknowledged", 16, nil, SYN),
    ack        = ProtoField.bool("slmp.flags.ack", "ACK: an acknowledgement", 16, nil, ACK),
    cumulative = ProtoField.bool("slmp.flags.cumulative", "Cumulative: offered, or used", 16, nil, CUM),
    wait       = ProtoField.bool("slmp.flags.wait", "Wait: not acknowledged yet", 16, nil, WAIT),
    reserved   = ProtoField.uint16("slmp.flags.reserved", "Reserved", base.HEX, nil, RESERVED),
    id         = ProtoField.uint32("slmp.id", "Message id", base.DEC_HEX),
    offset     = ProtoField.uint32("slmp.offset", "Offset", base.DEC, nil, nil, "of the segment's first byte in the message"),
    payload    = ProtoField.bytes("slmp.payload", "Payload"),
    len        = ProtoField.uint32("slmp.len", "Payload length", base.DEC),
    length     = ProtoField.uint64("slmp.length", "Message length", base.DEC),
    to         = ProtoField.uint32("slmp.ack.end", "Processed up to", base.DEC, nil, nil, "all bytes below; 4294967295 or more"),
    bitmap     = ProtoField.uint64("slmp.ack.bitmap", "Segments beyond", base.HEX, nil, nil, "bit i of word w: segment 64w+i+1 after the one at the end"),
}
slmp.fields = f

local e = {
    short  = ProtoExpert.new("slmp.short", "Too short for an SLMP header", expert.group.MALFORMED, expert.severity.ERROR),
    size   = ProtoExpert.new("slmp.ack.size", "No such length of an acknowledgement", expert.group.MALFORMED, expert.severity.ERROR),
    beyond = ProtoExpert.new("slmp.beyond", "Ends behind byte 4 GiB", expert.group.MALFORMED, expert.severity.ERROR),
    flags  = ProtoExpert.new("slmp.flags.odd", "Flags that mean nothing here", expert.group.PROTOCOL, expert.severity.WARN),
}
slmp.experts = e

local function has(flags, bit) return math.floor(flags / bit) % 2 == 1 end

local function flag_names(flags, but)
    local s = {}
    for _, n in ipairs(names) do
        if has(flags, n[1]) and n[1] ~= but then s[#s + 1] = n[2] end
    end
    if flags % (RESERVED + 1) ~= 0 then s[#s + 1] = string.format("reserved 0x%03x", flags % (RESERVED + 1)) end
    return s
end

-- The numbers of the bits that are set in n big-endian 64-bit words, as ranges;
-- bit 0 of word 0 is 1.
local function ranges(tvb, at, n)
    local s, first, last = {}, nil, nil
    local function close()
        if first then s[#s + 1] = first == last and tostring(first) or first .. "-" .. last end
        first = nil
    end
    for i = 0, 64 * n - 1 do
        local byte = tvb(at + 8 * math.floor(i / 64) + 7 - math.floor(i % 64 / 8), 1):uint()
        if has(byte, 2 ^ (i % 8)) then
            first = first or i + 1
            last = i + 1
        else
            close()
        end
    end
    close()
    return table.concat(s, ",")
end

local function malformed(tree, pinfo, expert, text)
    tree:add_proto_expert_info(expert, text)
    pinfo.cols.info:append(" [malformed: " .. text .. "]")
end

local function cumulative(tvb, tree, pinfo)
    tree:add(f.to, tvb(HEADER, 4))
    local words = (tvb:len() - CUMULATIVE) / 8
    for w = 0, words - 1 do tree:add(f.bitmap, tvb(CUMULATIVE + 8 * w, 8)) end
    local beyond = ranges(tvb, CUMULATIVE, words)
    pinfo.cols.info:append(" end=" .. tvb(HEADER, 4):uint())
    if beyond ~= "" then
        tree:append_text(", beyond: " .. beyond)
        pinfo.cols.info:append(" beyond=" .. beyond)
    end
end

function slmp.dissector(tvb, pinfo, root)
    pinfo.cols.protocol = "SLMP"
    local size = tvb:reported_len() -- a capture may have cut what follows the header
    local tree = root:add(slmp, tvb())
    local cut = tvb:len() < size
    if tvb:len() < HEADER then
        pinfo.cols.info = "SLMP"
        if size < HEADER then
            malformed(tree, pinfo, e.short, size .. " of " .. HEADER .. " header bytes")
        else
            pinfo.cols.info:append(" [cut by the capture]")
        end
        return tvb:len()
    end

    local flags, id, offset = tvb(0, 2):uint(), tvb(2, 4):uint(), tvb(6, 4):uint()
    local all = flag_names(flags)
    local item = tree:add(f.flags, tvb(0, 2))
    item:append_text(" (" .. (#all > 0 and table.concat(all, ", ") or "none") .. ")")
    for _, k in ipairs({ "eom", "syn", "ack", "cumulative", "wait", "reserved" }) do item:add(f[k], tvb(0, 2)) end
    tree:add(f.id, tvb(2, 4))
    tree:add(f.offset, tvb(6, 4))

    local ack = has(flags, ACK)
    local info = string.format("%s id=%d off=%d", ack and "ack" or "seg", id, offset)
    if not ack then info = info .. " len=" .. size - HEADER end
    for _, name in ipairs(flag_names(flags, ACK)) do info = info .. " " .. name end
    pinfo.cols.info = info
    tree:append_text(", " .. info)

    local odd = has(flags, WAIT) and not (ack and has(flags, CUM))
        or ack and (has(flags, EOM) or has(flags, SYN))
        or not ack and has(flags, CUM) and not has(flags, SYN)
    if odd then item:add_proto_expert_info(e.flags) end

    if not ack then
        tree:add(f.len, size - HEADER):set_generated()
        if tvb:len() > HEADER then tree:add(f.payload, tvb(HEADER)) end
        if offset + size - HEADER > 2 ^ 32 then
            malformed(tree, pinfo, e.beyond, "ends behind byte 4 GiB")
        elseif has(flags, EOM) then
            tree:add(f.length, UInt64.new(0) + offset + size - HEADER):set_generated()
        end
        return tvb:len()
    end

    local words = (size - CUMULATIVE) / 8
    if not has(flags, CUM) then
        if size ~= HEADER then malformed(tree, pinfo, e.size, size .. " bytes, an ACK has " .. HEADER) end
    elseif words < 1 or words > MAX_WORDS or words % 1 ~= 0 then
        malformed(tree, pinfo, e.size, size .. " bytes, a cumulative ACK has 14 + 8 * (1.." .. MAX_WORDS .. ")")
    elseif cut then
        pinfo.cols.info:append(" [cut by the capture]")
    else
        cumulative(tvb, tree, pinfo)
    end
    return tvb:len()
end

DissectorTable.get("udp.port"):add(PORT, slmp)
