// SPDX-License-Identifier: Apache-2.0

// Package ddtloops has the loops that a programmer would write to unpack messages, if
// there were no datatypes: for vectors, and for the applications of ddt.Apps. Datatypes
// are measured against them.
//
// A loop knows at compile time what an element is, and takes a message as a whole. To it
// memory is arrays, as it is to the application; there is one loop for each dimension,
// copy for long rows, and assignment for short ones.
package ddtloops

import (
	"slices"
	"unsafe"

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

// as makes an array of memory.
func as[T any](mem []byte) []T {
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(mem))), len(mem)/int(unsafe.Sizeof(t)))
}

// Vector returns a loop for count blocks, stride bytes apart.
func Vector(count, block, stride int) Loop {
	if stride%block == 0 {
		switch n, stride := count, stride/block; block {
		case 4:
			return elements[uint32](n, stride)
		case 8:
			return elements[uint64](n, stride)
		case 16:
			return elements[[2]float64](n, stride)
		case 32:
			return elements[[4]float64](n, stride)
		case 64:
			return elements[[8]float64](n, stride)
		}
	}
	return func(mem, stream []byte) {
		for i := range count {
			copy(mem[i*stride:i*stride+block], stream[i*block:])
		}
	}
}

func elements[T any](count, stride int) Loop {
	return func(mem, stream []byte) {
		array, from := as[T](mem), as[T](stream)[:count]
		at := 0
		for _, v := range from {
			array[at] = v
			at += stride
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
	vars, row := p["vars"], x1-x0
	return func(mem, stream []byte) {
		mesh, from := as[float64](mem), as[float64](stream)
		for v := range vars {
			for z := z0; z < z1; z++ {
				for y := y0; y < y1; y++ {
					at := x0 + nx*(y+ny*(z+nz*v))
					copy(mesh[at:at+row], from)
					from = from[row:]
				}
			}
		}
	}
}

func fft2d(p params) Loop {
	n := p["n"]
	tile := n / p["procs"]
	return func(mem, stream []byte) {
		matrix, from := as[complex128](mem), as[complex128](stream)
		for row := range tile {
			at := row
			for _, v := range from[row*tile : (row+1)*tile] {
				matrix[at] = v
				at += n
			}
		}
	}
}

func lammps(p params, lists [][]int32, others int) Loop {
	atoms, room := lists[0], p["local"]+p["sent"]
	return func(mem, stream []byte) {
		x, from := as[[3]float64](mem), as[[3]float64](stream)[:len(atoms)]
		for i, atom := range atoms {
			x[atom] = from[i]
		}
		all, rest := as[float64](mem), as[float64](stream)
		for k := range others {
			array, from := all[(3+k)*room:], rest[(3+k)*len(atoms):][:len(atoms)]
			for i, atom := range atoms {
				array[atom] = from[i]
			}
		}
	}
}

func milc(p params) Loop {
	half, nz, nt := p["nx"]*p["ny"]/2, p["nz"], p["nt"]
	return func(mem, stream []byte) {
		sites, from := as[[6]float32](mem), as[[6]float32](stream)
		for parity := range 2 {
			for t := range nt {
				at := (parity*nt + t) * nz * half
				copy(sites[at:at+half], from)
				from = from[half:]
			}
		}
	}
}

func nasLU(p params) Loop {
	ny, nz := p["ny"]+2, p["nz"]
	return func(mem, stream []byte) {
		u, from := as[[5]float64](mem), as[[5]float64](stream)
		for z := range nz {
			u[z*ny] = from[z]
		}
	}
}

// nasMG is the face normal to x.
func nasMG(p params) Loop {
	nx, ny, nz := p["nx"], p["ny"], p["nz"]
	return func(mem, stream []byte) {
		u, from := as[float64](mem), as[float64](stream)
		for z := range nz - 2 {
			at := nx * ny * z
			for _, v := range from[z*(ny-2) : (z+1)*(ny-2)] {
				u[at] = v
				at += nx
			}
		}
	}
}

func specfemOC(lists [][]int32) Loop {
	points := lists[0]
	return func(mem, stream []byte) {
		array, from := as[float32](mem), as[float32](stream)[:len(points)]
		for i, point := range points {
			array[point] = from[i]
		}
	}
}

func specfemCM(p params, lists [][]int32) Loop {
	cm, ic, start := lists[0], lists[1], p["cm"]
	return func(mem, stream []byte) {
		array, from := as[[3]float32](mem), as[[3]float32](stream)[:len(cm)+len(ic)]
		for i, point := range cm {
			array[point] = from[i]
		}
		array, from = array[start:], from[len(cm):]
		for i, point := range ic {
			array[point] = from[i]
		}
	}
}

// sw4x has two points of halo: six doubles.
func sw4x(p params) Loop {
	halo := 2 * p["padding"]
	ni, rows := p["nx"]+halo, (p["ny"]+halo)*(p["nz"]+halo)
	return func(mem, stream []byte) {
		u, from := as[[3]float64](mem), as[[3]float64](stream)[:2*rows]
		at := 0
		for i := 0; i+1 < len(from); i += 2 {
			u[at] = from[i]
			u[at+1] = from[i+1]
			at += ni
		}
	}
}

func sw4y(p params) Loop {
	halo := 2 * p["padding"]
	ni, nj, nk := p["nx"]+halo, p["ny"]+halo, p["nz"]+halo
	run := p["padding"] * ni
	return func(mem, stream []byte) {
		u, from := as[[3]float64](mem), as[[3]float64](stream)
		for k := range nk {
			at := k * ni * nj
			copy(u[at:at+run], from[k*run:])
		}
	}
}

// wrfX has three points of halo.
func wrfX(p params) Loop {
	return wrf(p, func(array, from []float32, rows, stride int) {
		at := 0
		for i := 0; i < 3*rows; i += 3 {
			to, v := array[at:at+3:at+3], from[i:i+3:i+3]
			to[0], to[1], to[2] = v[0], v[1], v[2]
			at += stride
		}
	})
}

func wrfY(p params) Loop {
	row := p["nx"]
	return wrf(p, func(array, from []float32, rows, stride int) {
		for i := range rows {
			copy(array[i*stride:i*stride+row], from[i*row:])
		}
	})
}

// wrf goes through the arrays. unpack is for rows that are stride points apart: those of a
// 2-D array, and of a level of x and z of the others.
func wrf(p params, unpack func(array, from []float32, rows, stride int)) Loop {
	mx, mz, my := p["mx"], p["mz"], p["my"]
	x0, y0, row, ny := p["x0"], p["y0"], p["nx"], p["ny"]
	vars2d, vars3d, vars4d, scalars := p["vars2d"], p["vars3d"], p["vars4d"], p["scalars"]
	return func(mem, stream []byte) {
		all, from := as[float32](mem), as[float32](stream)
		at := 0 // where the array begins
		for range vars2d {
			unpack(all[at+x0+mx*y0:], from, ny, mx)
			from = from[ny*row:]
			at += mx * my
		}
		cube := func() {
			for y := range ny {
				unpack(all[at+x0+mx*mz*(y0+y):], from, mz, mx)
				from = from[mz*row:]
			}
			at += mx * mz * my
		}
		for range vars3d {
			cube()
		}
		for range vars4d {
			at += mx * mz * my // the first is not in the message
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
				at := i*18432 + j*12288 + k*6144
				for range 32 {
					copy(mem[at:at+432], stream)
					stream = stream[432:]
					at += 576
				}
			}
		}
	}
}
