// SPDX-License-Identifier: Apache-2.0

// Package ddtloops has the loops that a programmer would write to unpack messages, if
// there were no datatypes: for vectors, and for the applications of ddt.Apps. Datatypes
// are measured against them.
//
// They know at compile time how wide an element is, and take a message as a whole. They
// are what the language gives without tricks: slices with their bounds, one loop for each
// dimension, copy for long rows and assignment of arrays for short ones.
package ddtloops

import (
	"slices"

	"github.com/xspin/xspin/ddt"
)

// A Loop unpacks a message: mem[0] is displacement 0.
type Loop func(mem, stream []byte)

// For returns the loop of an App, with its default parameters.
func For(name string) (loop Loop, ok bool) {
	i := slices.IndexFunc(ddt.Apps(), func(a ddt.App) bool { return a.Name == name })
	if i < 0 {
		return nil, false
	}
	app, p := ddt.Apps()[i], params{}
	for _, param := range app.Params {
		p[param.Name] = int(param.Default)
	}
	switch name {
	case "COMB":
		return comb(p), true
	case "FFT2D":
		return fft2d(p), true
	case "LAMMPS":
		return lammps(p, indices(app), 3), true
	case "LAMMPS_full":
		return lammps(p, indices(app), 5), true
	case "MILC":
		return milc(p), true
	case "NAS_LU":
		return nasLU(p), true
	case "NAS_MG":
		return nasMG(p), true
	case "SPECFEM3D_oc":
		return specfemOC(indices(app)), true
	case "SPECFEM3D_cm":
		return specfemCM(p, indices(app)), true
	case "SW4LITE_x":
		return sw4x(p), true
	case "SW4LITE_y":
		return sw4y(p), true
	case "WRF_x":
		return wrfX(p), true
	case "WRF_y":
		return wrfY(p), true
	case "Simple":
		return func(mem, stream []byte) { copy(mem, stream) }, true
	case "Complex":
		return complexHalo, true
	}
	return nil, false
}

type params map[string]int

// indices returns the index lists of an App's type, as the application has them: one, or
// one for each array.
func indices(app ddt.App) [][]int32 {
	t, _, err := app.Make(nil)
	if err != nil {
		panic(err)
	}
	list := func(t *ddt.Type) []int32 {
		c := t.Contents()
		out := make([]int32, len(c.Displs))
		for i, d := range c.Displs {
			out[i] = int32(d / c.Blocklen)
		}
		return out
	}
	c := t.Contents()
	if c.Combiner != ddt.CombinerStruct {
		return [][]int32{list(t)}
	}
	lists := make([][]int32, len(c.Types))
	for i, t := range c.Types {
		lists[i] = list(t)
	}
	return lists
}

// Vector returns a loop for count blocks, stride bytes apart.
func Vector(count, block, stride int) Loop {
	switch block {
	case 4:
		return func(mem, stream []byte) {
			for i := range count {
				*(*[4]byte)(mem[i*stride:]) = *(*[4]byte)(stream[i*4:])
			}
		}
	case 8:
		return func(mem, stream []byte) {
			for i := range count {
				*(*[8]byte)(mem[i*stride:]) = *(*[8]byte)(stream[i*8:])
			}
		}
	case 16:
		return func(mem, stream []byte) {
			for i := range count {
				*(*[16]byte)(mem[i*stride:]) = *(*[16]byte)(stream[i*16:])
			}
		}
	case 32:
		return func(mem, stream []byte) {
			for i := range count {
				*(*[32]byte)(mem[i*stride:]) = *(*[32]byte)(stream[i*32:])
			}
		}
	case 64:
		return func(mem, stream []byte) {
			for i := range count {
				*(*[64]byte)(mem[i*stride:]) = *(*[64]byte)(stream[i*64:])
			}
		}
	default:
		return func(mem, stream []byte) {
			for i := range count {
				copy(mem[i*stride:i*stride+block], stream[i*block:])
			}
		}
	}
}

func comb(p params) Loop {
	ghost := p["ghost"]
	nx, ny, nz := p["nx"]+2*ghost, p["ny"]+2*ghost, p["nz"]+2*ghost
	// From and to which zone in a dimension.
	halo := func(zones, side int) (from, to int) {
		switch side {
		case -1:
			return 0, ghost
		case 1:
			return ghost + zones, zones + 2*ghost
		default:
			return ghost, ghost + zones
		}
	}
	x0, x1 := halo(p["nx"], p["x"])
	y0, y1 := halo(p["ny"], p["y"])
	z0, z1 := halo(p["nz"], p["z"])
	vars, row := p["vars"], (x1-x0)*8
	return func(mem, stream []byte) {
		for v := range vars {
			for z := z0; z < z1; z++ {
				for y := y0; y < y1; y++ {
					at := (x0 + nx*(y+ny*(z+nz*v))) * 8
					copy(mem[at:at+row], stream)
					stream = stream[row:]
				}
			}
		}
	}
}

func fft2d(p params) Loop {
	n := p["n"]
	tile := n / p["procs"]
	return func(mem, stream []byte) {
		for row := range tile {
			for column := range tile {
				*(*[16]byte)(mem[(column*n+row)*16:]) = *(*[16]byte)(stream[(row*tile+column)*16:])
			}
		}
	}
}

func lammps(p params, lists [][]int32, others int) Loop {
	atoms, room := lists[0], p["local"]+p["sent"]
	return func(mem, stream []byte) {
		for i, atom := range atoms {
			*(*[24]byte)(mem[int(atom)*24:]) = *(*[24]byte)(stream[i*24:])
		}
		for k := range others {
			array := mem[(3+k)*room*8:]
			part := stream[(3+k)*len(atoms)*8:]
			for i, atom := range atoms {
				*(*[8]byte)(array[int(atom)*8:]) = *(*[8]byte)(part[i*8:])
			}
		}
	}
}

func milc(p params) Loop {
	slice, nz, nt := p["nx"]*p["ny"], p["nz"], p["nt"]
	run := slice / 2 * 24
	return func(mem, stream []byte) {
		for parity := range 2 {
			for t := range nt {
				at := (parity*nt + t) * nz * run
				copy(mem[at:at+run], stream)
				stream = stream[run:]
			}
		}
	}
}

func nasLU(p params) Loop {
	ny, nz := p["ny"]+2, p["nz"]
	return func(mem, stream []byte) {
		for z := range nz {
			*(*[40]byte)(mem[z*ny*40:]) = *(*[40]byte)(stream[z*40:])
		}
	}
}

// nasMG is the face normal to x.
func nasMG(p params) Loop {
	nx, ny, nz := p["nx"], p["ny"], p["nz"]
	return func(mem, stream []byte) {
		i := 0
		for z := range nz - 2 {
			for y := range ny - 2 {
				*(*[8]byte)(mem[nx*(y+ny*z)*8:]) = *(*[8]byte)(stream[i*8:])
				i++
			}
		}
	}
}

func specfemOC(lists [][]int32) Loop {
	points := lists[0]
	return func(mem, stream []byte) {
		for i, point := range points {
			*(*[4]byte)(mem[int(point)*4:]) = *(*[4]byte)(stream[i*4:])
		}
	}
}

func specfemCM(p params, lists [][]int32) Loop {
	cm, ic, start := lists[0], lists[1], p["cm"]*12
	return func(mem, stream []byte) {
		for i, point := range cm {
			*(*[12]byte)(mem[int(point)*12:]) = *(*[12]byte)(stream[i*12:])
		}
		mem, stream = mem[start:], stream[len(cm)*12:]
		for i, point := range ic {
			*(*[12]byte)(mem[int(point)*12:]) = *(*[12]byte)(stream[i*12:])
		}
	}
}

// sw4x has two points of halo, so 48 bytes.
func sw4x(p params) Loop {
	halo := 2 * p["padding"]
	ni, rows := p["nx"]+halo, (p["ny"]+halo)*(p["nz"]+halo)
	return func(mem, stream []byte) {
		for row := range rows {
			*(*[48]byte)(mem[row*ni*24:]) = *(*[48]byte)(stream[row*48:])
		}
	}
}

func sw4y(p params) Loop {
	halo := 2 * p["padding"]
	ni, nj, nk := p["nx"]+halo, p["ny"]+halo, p["nz"]+halo
	run := p["padding"] * ni * 24
	return func(mem, stream []byte) {
		for k := range nk {
			at := k * ni * nj * 24
			copy(mem[at:at+run], stream[k*run:])
		}
	}
}

// wrfX has three points of halo, so rows of 12 bytes.
func wrfX(p params) Loop {
	return wrf(p, func(mem, stream []byte, rows, stride int) {
		for row := range rows {
			*(*[12]byte)(mem[row*stride:]) = *(*[12]byte)(stream[row*12:])
		}
	})
}

func wrfY(p params) Loop {
	row := p["nx"] * 4
	return wrf(p, func(mem, stream []byte, rows, stride int) {
		for i := range rows {
			copy(mem[i*stride:i*stride+row], stream[i*row:])
		}
	})
}

// wrf goes through the arrays. planes unpacks rows that are stride bytes apart: those of
// a 2-D array, and of a level of x and z of the others.
func wrf(p params, planes func(mem, stream []byte, rows, stride int)) Loop {
	mx, mz, my := p["mx"], p["mz"], p["my"]
	x0, y0, ny := p["x0"], p["y0"], p["ny"]
	row := p["nx"] * 4
	vars2d, vars3d, vars4d, scalars := p["vars2d"], p["vars3d"], p["vars4d"], p["scalars"]
	return func(mem, stream []byte) {
		at := 0 // where the array begins
		for range vars2d {
			planes(mem[at+(x0+mx*y0)*4:], stream, ny, mx*4)
			stream = stream[ny*row:]
			at += mx * my * 4
		}
		cube := func() {
			for y := range ny {
				planes(mem[at+(x0+mx*mz*(y0+y))*4:], stream, mz, mx*4)
				stream = stream[mz*row:]
			}
			at += mx * mz * my * 4
		}
		for range vars3d {
			cube()
		}
		for range vars4d {
			at += mx * mz * my * 4 // the first is not in the message
			for range scalars {
				cube()
			}
		}
	}
}

// complexHalo has eight grids of 32 rows of 432 bytes, which overlap.
func complexHalo(mem, stream []byte) {
	for i := range 2 {
		for j := range 2 {
			for k := range 2 {
				for row := range 32 {
					at := i*18432 + j*12288 + k*6144 + row*576
					copy(mem[at:at+432], stream)
					stream = stream[432:]
				}
			}
		}
	}
}
